"""Is every byte in a store the one that was put? Asked of the files alone, without a model.

Reads all payloads and compares every layer with its checksum; then files with index, both ways. May
run while the store is in use, and on a store that cannot be written: it changes nothing, unless it
is to repair. Foreign files are reported and left alone in any case.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blendrag.errors import CorruptKVError, StoreError
from blendrag.store.disk_errors import named_errors
from blendrag.store.files import Name, PayloadFiles
from blendrag.store.index_errors import IndexOdd
from blendrag.store.maintenance.foreign import foreign
from blendrag.store.maintenance.index_view import IndexView
from blendrag.store.maintenance.opening import changing, looking, require_writable
from blendrag.store.payload import opened, reader, verified_pieces

#: Told how many bytes are done, and of how many.
Watch = Callable[[int, int], None]

#: Faults described in words; all are counted.
MAX_FAULTS = 1000


@dataclass(frozen=True)
class NamespaceCheck:
    """What was found of one namespace."""

    namespace: str
    good: int
    good_bytes: int
    damaged: int
    """Not what was put: a miss, and set aside by whoever meets it first."""
    unreadable: int
    """Not this user's to read; nothing is known of them."""
    missing_rows: int | None
    """Payloads that the index does not know; ``None`` where the index could not be looked at."""
    dead_rows: int | None
    """Rows of the index whose payload is gone."""
    foreign_files: int


@dataclass(frozen=True)
class CheckReport:
    """What was found in a store, before any repair."""

    root: str
    namespaces: tuple[NamespaceCheck, ...]
    index: str
    """``"sound"``, or what is the matter with it."""
    foreign_files: int
    """All of them, those outside of any namespace included."""
    faults: tuple[str, ...]
    """What is damaged or unreadable, and why; the first :data:`MAX_FAULTS`."""
    read_bytes: int
    seconds: float
    repaired: bool

    @property
    def is_good(self) -> bool:
        """Whether every byte was read and is the one that was put."""
        return not any(each.damaged or each.unreadable for each in self.namespaces)


class _Findings:
    """What was met so far."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.damaged: list[Name] = []
        self.faults: list[str] = []
        self.index = "sound"
        self.read_bytes = 0

    def fault(self, name: Name, kind: str, reason: str) -> None:
        self.counts[name.namespace][kind] += 1
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(f"{name.namespace}/{name.file}: {reason}")

    def namespaces(self) -> tuple[NamespaceCheck, ...]:
        known = self.index == "sound"
        return tuple(
            NamespaceCheck(
                namespace=namespace,
                good=count["good"],
                good_bytes=count["good_bytes"],
                damaged=count["damaged"],
                unreadable=count["unreadable"],
                missing_rows=count["missing"] if known else None,
                dead_rows=count["dead"] if known else None,
                foreign_files=count["foreign"],
            )
            for namespace, count in sorted(self.counts.items())
            if namespace
        )


def check(root: Path, repair: bool = False, watch: Watch = lambda done, total: None) -> CheckReport:
    """Verify all that is stored at ``root``; with ``repair``, mend what can be mended.

    A repair sets damaged payloads aside (their chunks are computed again when they are asked for),
    rebuilds the index where it is odd, drops rows whose payload is gone and indexes payloads without
    a row. It evicts nothing. Raises :class:`StoreUnavailableError`.
    """
    began = time.monotonic()
    if repair:
        require_writable(root)
    findings = _Findings()
    with looking(root) as files, named_errors(f"checking store {root}"):
        _check_payloads(files, findings, watch)
        _check_index(root, files, findings)
        strangers = list(foreign(root))
    for each in strangers:
        findings.counts[each.namespace]["foreign"] += 1
    if repair:
        _repair(root, findings.damaged)
    return CheckReport(
        root=str(root),
        namespaces=findings.namespaces(),
        index=findings.index,
        foreign_files=len(strangers),
        faults=tuple(findings.faults),
        read_bytes=findings.read_bytes,
        seconds=time.monotonic() - began,
        repaired=repair,
    )


def _check_payloads(files: PayloadFiles, findings: _Findings, watch: Watch) -> None:
    total = sum(files.size(name) for name in files.walk())
    for name in files.walk():
        try:
            size_bytes = verify(files, name)
        except FileNotFoundError:
            continue  # evicted meanwhile
        except PermissionError as exc:
            findings.fault(name, "unreadable", exc.strerror or str(exc))
        except CorruptKVError as exc:
            findings.damaged.append(name)
            findings.fault(name, "damaged", str(exc))
        else:
            findings.counts[name.namespace]["good"] += 1
            findings.counts[name.namespace]["good_bytes"] += size_bytes
        findings.read_bytes += files.size(name)
        watch(findings.read_bytes, max(total, findings.read_bytes))


def verify(files: PayloadFiles, name: Name) -> int:
    """Read a payload whole; its bytes. Raises as :func:`payload.opened` does."""
    with opened(files, name) as (fd, found):
        for _ in verified_pieces(found, reader(fd, found.frame.header_bytes)):
            pass
        return found.file_bytes


def _check_index(root: Path, files: PayloadFiles, findings: _Findings) -> None:
    """Compare files and rows. What others are putting or evicting just now is looked at twice."""
    try:
        with IndexView(root / "index") as view:
            unknown = [name for name in files.walk() if not view.knows(name)]
            dead = [row.name for row in view if not files.exists(row.name)]
            counts = findings.counts
            for name in unknown:
                counts[name.namespace]["missing"] += files.exists(name) and not view.knows(name)
            for name in dead:
                counts[name.namespace]["dead"] += view.knows(name) and not files.exists(name)
    except IndexOdd as exc:
        findings.index = f"to be rebuilt ({exc})"
    except StoreError as exc:
        findings.index = str(exc)


def _repair(root: Path, damaged: list[Name]) -> None:
    with changing(root) as store:
        for name in _still_damaged(store.files, damaged):
            store.writer.quarantine(name)
        store.writer.recover()


def _still_damaged(files: PayloadFiles, names: list[Name]) -> Iterator[Name]:
    """Those that a second reading finds damaged, too: a disk may have failed for a moment."""
    for name in names:
        try:
            verify(files, name)
        except CorruptKVError:
            yield name
        except OSError:
            continue
