"""Verify every payload of a store, compare files with index, and repair what can be repaired.

A check only reads. Foreign files, which the store did not name, are never touched.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from blendrag.errors import CorruptKVError, StoreError
from blendrag.store.durable import named_errors
from blendrag.store.index import DATABASE_FILES, Index, IndexCorrupt
from blendrag.store.maintenance import opening
from blendrag.store.maintenance.opening import Progress, no_progress
from blendrag.store.payload import open_payload, verified_pieces
from blendrag.store.payload_files import (
    FILE_NAME,
    Name,
    PayloadFiles,
)

#: Faults described in words; all are counted.
MAX_FAULTS = 1000
#: Names that the store gives in ``quarantine/``: payloads, and the files of an index database.
QUARANTINED = re.compile(
    rf"{FILE_NAME.pattern}|({'|'.join(map(re.escape, DATABASE_FILES))})(\.[0-9a-f]{{16}})?",
    re.ASCII,
)


@dataclass
class NamespaceCheck:
    namespace: str
    good: int = 0
    good_bytes: int = 0
    damaged: int = 0
    """Payloads whose bytes are not those that were put. A query would miss and set them aside."""
    unreadable: int = 0
    """Payloads that this user may not read."""
    missing_rows: int | None = None
    """Payloads that the index does not know; ``None`` unless the index is sound."""
    dead_rows: int | None = None
    """Rows of the index whose payload is gone; ``None`` unless the index is sound."""


@dataclass
class CheckReport:
    """What a check found, before any repair."""

    root: str
    namespaces: tuple[NamespaceCheck, ...] = ()
    index: Literal["sound", "damaged", "unavailable"] = "sound"
    """``damaged`` is rebuilt by a repair; ``unavailable`` could not be read now."""
    index_fault: str = ""
    """Why the index is not sound."""
    faults: list[str] = field(default_factory=list)
    """Damaged or unreadable payloads and why; the first :data:`MAX_FAULTS`."""
    read_bytes: int = 0
    seconds: float = 0.0
    repaired: bool = False

    @property
    def is_good(self) -> bool:
        """Whether every payload could be read and is intact."""
        return not any(each.damaged or each.unreadable for each in self.namespaces)


class _Namespaces(dict[str, NamespaceCheck]):
    def __missing__(self, namespace: str) -> NamespaceCheck:
        return self.setdefault(namespace, NamespaceCheck(namespace))


def check(root: Path, repair: bool = False, progress: Progress = no_progress) -> CheckReport:
    """Verify the store at ``root``; with ``repair``, mend it.

    A repair quarantines damaged payloads (their chunks are computed again on demand), rebuilds a
    damaged index, drops dead rows and indexes missing payloads. It evicts nothing. Raises
    :class:`StoreUnavailableError`.
    """
    began = time.monotonic()
    if repair:
        opening.require_writable(root)
    report, found = CheckReport(str(root), repaired=repair), _Namespaces()
    with opening.open_for_reading(root) as files, named_errors(f"checking store {root}"):
        damaged = _check_payloads(files, report, found, progress)
        _check_index(root, files, report, found)
    report.namespaces = tuple(found[namespace] for namespace in sorted(found))
    if repair:
        _repair(root, damaged)
    report.seconds = time.monotonic() - began
    return report


def _check_payloads(
    files: PayloadFiles, report: CheckReport, found: _Namespaces, progress: Progress
) -> list[Name]:
    """Verify every payload; returns the damaged ones."""
    total_bytes = sum(files.size(name) for name in files.walk())
    damaged = []
    for name in files.walk():
        fault = ""
        try:
            size_bytes = verify(files, name)
        except FileNotFoundError:
            continue  # evicted meanwhile
        except PermissionError as exc:
            found[name.namespace].unreadable += 1
            fault = exc.strerror or str(exc)
        except CorruptKVError as exc:
            found[name.namespace].damaged += 1
            damaged.append(name)
            fault = str(exc)
        else:
            found[name.namespace].good += 1
            found[name.namespace].good_bytes += size_bytes
        if fault and len(report.faults) < MAX_FAULTS:
            report.faults.append(f"{name.namespace}/{name.file}: {fault}")
        report.read_bytes += files.size(name)
        progress(report.read_bytes, max(total_bytes, report.read_bytes))
    return damaged


def verify(files: PayloadFiles, name: Name) -> int:
    """Read and verify a whole payload; returns its bytes. Raises like :func:`open_payload`."""
    with open_payload(files, name) as (header, read):
        for _ in verified_pieces(header, read):
            pass
        return header.file_bytes


def _repair(root: Path, damaged: list[Name]) -> None:
    with opening.open_for_changes(root) as store:
        for name in damaged:
            try:
                verify(store.files, name)  # again: the disk may have failed for a moment only
            except CorruptKVError:
                store.quarantine(name)
            except OSError:
                continue
        store.recover()


def _check_index(root: Path, files: PayloadFiles, report: CheckReport, found: _Namespaces) -> None:
    """Count files without row and rows without file.

    Each difference is looked at twice, because other processes may be writing or evicting.
    """
    index = Index(root / "index", read_only=True)
    try:
        with contextlib.closing(index):
            index.open()
            unknown = [name for name in files.walk() if not index.knows(name)]
            dead = [name for name, _ in index.oldest() if not files.exists(name)]
            unknown = [name for name in unknown if files.exists(name) and not index.knows(name)]
            dead = [name for name in dead if index.knows(name) and not files.exists(name)]
    except StoreError as exc:
        report.index = "damaged" if isinstance(exc, IndexCorrupt) else "unavailable"
        report.index_fault = str(exc)
        return
    missing, left = (Counter(name.namespace for name in names) for names in (unknown, dead))
    for namespace in {*found, *missing, *left}:
        found[namespace].missing_rows = missing[namespace]
        found[namespace].dead_rows = left[namespace]
