"""Small JSON records of a store: machine profiles and calibrations.

One file per namespace and kind in the store's folder ``verified``. Its entries may come from several machines
and versions of blendrag: each reads the entries that are valid for it and keeps the others.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from blendrag.store import regular_files
from blendrag.store.identity import is_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger(__name__)

T = TypeVar("T", bound="DataclassInstance")
#: Largest file that is read.
MAX_BYTES = 16 * regular_files.MIB
#: Entries kept per file; the oldest goes first.
MAX_ENTRIES = 64


@cache  # making one takes longer than reading a record
def _validator(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def recorded_namespaces(root: Path, what: str) -> list[str]:
    """The namespaces of the store at ``root`` of which such records are kept."""
    ending = f".{what}.json"
    names = [path.name.removesuffix(ending) for path in (root / "verified").glob(f"*{ending}")]
    return [name for name in names if is_name(name)]


def recorded_identity(root: Path, namespace: str) -> dict[str, Any] | None:
    """The fields of the :class:`~blendrag.store.identity.ModelIdentity` whose KV a namespace holds, unchecked
    and read without torch; ``None`` if it is not recorded, as in stores of earlier versions, of imported KV,
    and of KV learned from prompts.
    """
    try:
        record = root / "verified" / f"{namespace}.loaded.json"
        identity = json.loads(regular_files.read_bytes(record, MAX_BYTES))["loaded"][-1]["identity"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return identity if isinstance(identity, dict) else None


@dataclass(frozen=True)
class Records(Generic[T]):
    """The entries of one file; ``kind`` is a dataclass whose annotations say which entries are valid."""

    root: Path
    name: str
    """Name of the file: the namespace, and what is recorded."""
    key: str
    """Name of the list of entries in the file."""
    kind: type[T]
    same: tuple[str, ...]
    """Fields by which an entry replaces an earlier one."""

    @property
    def path(self) -> Path:
        return Path(self.root) / "verified" / f"{self.name}.json"

    def entries(self) -> list[T]:
        """All valid entries, oldest first."""
        adapter: TypeAdapter[T] = _validator(self.kind)
        valid = []
        for entry in self.unchecked():
            with suppress(ValidationError):
                valid.append(adapter.validate_python(entry))
        return valid

    def unchecked(self) -> list[Any]:
        """All entries as they are. A damaged file is renamed and has none."""
        try:
            data = regular_files.read_bytes(self.path, MAX_BYTES)
        except OSError:
            return []
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            found = json.loads(data)
            entries = found[self.key]
            if isinstance(entries, list):
                return entries
        aside = self.path.with_suffix(".damaged")
        log.warning("%s is damaged and is not used; it is kept as %s", self.path, aside.name)
        with suppress(OSError):
            self.path.rename(aside)
        return []

    def keep(self, entry: T) -> None:
        """Append ``entry`` in place of an earlier one. Atomic. Raises :class:`OSError`."""
        new = json.loads(json.dumps(asdict(entry)))
        others = [
            old
            for old in self.unchecked()
            if not isinstance(old, dict) or any(old.get(name) != new[name] for name in self.same)
        ]
        self._write([*others, new])

    def replace(self, entries: Sequence[T]) -> None:
        """Keep these ``entries`` alone. Atomic. Raises :class:`OSError`."""
        self._write([asdict(entry) for entry in entries])

    def clear(self) -> bool:
        """Remove all entries; whether there were any. Raises :class:`OSError`."""
        had = bool(self.unchecked())
        self.path.unlink(missing_ok=True)
        return had

    def _write(self, entries: list[Any]) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = {self.key: entries[-MAX_ENTRIES:]}
        regular_files.replace(self.path, json.dumps(kept).encode())

    @property
    def stamp(self) -> tuple[int, int] | None:
        """Changes with the file's content; ``None`` without a file."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino
