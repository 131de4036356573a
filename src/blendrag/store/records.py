"""Small JSON records that a store keeps of this machine: gate verdicts, machine profiles, calibrations.

One file per namespace and kind in the store's folder ``verified``. Its entries belong to machines and
versions of blendrag that may differ: each reads the entries it understands and keeps the others.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendrag.store import regular_files

log = logging.getLogger(__name__)

#: Largest file that is read.
MAX_BYTES = 16 * regular_files.MIB
#: Entries kept per file; the oldest goes first.
MAX_ENTRIES = 64
#: What reading an entry of unknown content may raise.
DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class Records:
    """The entries of one file, a JSON object with one list."""

    path: Path
    key: str
    """Name of the list."""

    def entries(self) -> list[Any]:
        """All entries, oldest first. A damaged file is renamed and has none."""
        try:
            data = regular_files.read_bytes(self.path, MAX_BYTES)
        except OSError:
            return []
        with suppress(*DAMAGE):
            found = json.loads(data)
            entries = found.get(self.key, [found])  # a gate verdict used to be a file of its own
            if isinstance(entries, list):
                return entries
        aside = self.path.with_suffix(".damaged")
        log.warning("%s is damaged and is not used; it is kept as %s", self.path, aside.name)
        with suppress(OSError):
            self.path.rename(aside)
        return []

    def keep(self, entry: dict[str, Any], replaces: Callable[[Any], bool]) -> None:
        """Append ``entry`` and drop those that it ``replaces``. Atomic. Raises :class:`OSError`."""
        others = [other for other in self.entries() if not replaces(other)]
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = [*others, entry][-MAX_ENTRIES:]
        regular_files.replace(self.path, json.dumps({self.key: kept}).encode())

    @property
    def stamp(self) -> tuple[int, int] | None:
        """Changes with the file's content; ``None`` without a file."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino


def verdicts(root: Path, namespace: str) -> Records:
    """What the gate found about a model."""
    return Records(Path(root) / "verified" / f"{namespace}.json", "verdicts")


def profiles(root: Path, namespace: str) -> Records:
    """What loading and computing take on a machine."""
    return Records(Path(root) / "verified" / f"{namespace}.profiles.json", "profiles")


def calibrations(root: Path, namespace: str) -> Records:
    """Schedules found for a model."""
    return Records(Path(root) / "verified" / f"{namespace}.schedules.json", "calibrations")
