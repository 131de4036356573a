"""Room for what is to be put: on the disk, and within the store's limit, least recently used goes first.

Owns which entries go. Knows nothing of how a payload is written.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from blendrag.errors import StoreFullError
from blendrag.store.disk_errors import megabytes
from blendrag.store.files import Name, PayloadFiles
from blendrag.store.index import Index
from blendrag.store.index_errors import IndexOdd
from blendrag.store.pins import Pins
from blendrag.store.rows import Row
from blendrag.store.tally import Tally

#: Left free on the file system for the index and everybody else.
RESERVE_BYTES = 4 << 20


class Choice(NamedTuple):
    """What would have to go."""

    victims: list[Row]
    excess_bytes: int
    """Too many even then, if positive."""
    seen_bytes: int
    """Of all rows that were looked at."""


def oldest_first(
    index: Index, excess_bytes: int, stays: Callable[[Name], bool], at_most: int = sys.maxsize
) -> Choice:
    """Choose the least recently used until ``excess_bytes`` would be gone. Changes nothing."""
    victims: list[Row] = []
    seen_bytes = 0
    for row in index.oldest() if excess_bytes > 0 else ():
        if excess_bytes <= 0 or len(victims) == at_most:
            break
        seen_bytes += row.size_bytes
        if not stays(row.name):
            victims.append(row)
            excess_bytes -= row.size_bytes
    return Choice(victims, excess_bytes, seen_bytes)


class Room:
    """The room of one store. Counts what it evicts."""

    def __init__(
        self,
        root: Path,
        files: PayloadFiles,
        index: Index,
        limit_bytes: Callable[[], int],
        pins: Pins,
        before_eviction: Callable[[], None],
        tally: Tally,
    ) -> None:
        """``limit_bytes`` says how large the store may be now; ``before_eviction`` brings the order
        of the index up to date."""
        self._root = root
        self._files = files
        self._index = index
        self._limit_bytes = limit_bytes
        self._pins = pins
        self._before_eviction = before_eviction
        self._tally = tally

    def require_on_disk(self, size_bytes: int) -> None:
        """Raise :class:`StoreFullError` unless the file system has so much, and some more."""
        status = os.statvfs(self._root)
        free_bytes = status.f_bavail * status.f_frsize
        needed_bytes = size_bytes + RESERVE_BYTES
        if free_bytes < needed_bytes:
            raise StoreFullError(
                f"the disk of store {self._root} has {megabytes(free_bytes)} left, expected "
                f"{megabytes(needed_bytes)}; free some space or choose another --store",
                needed_bytes,
            )

    def make(self, needed_bytes: int, but: Name | None = None) -> None:
        """Evict the least recently used until ``needed_bytes`` fit. Caller holds the index lock.

        ``but`` is the entry the room is for, which stays. Evicts nothing, and raises
        :class:`StoreFullError`, when that cannot be reached.
        """
        entries, size_bytes = self._index.totals()
        limit_bytes = self._limit_bytes()
        excess_bytes = size_bytes + needed_bytes - limit_bytes
        if excess_bytes <= 0:
            return
        if needed_bytes <= limit_bytes:
            self._before_eviction()
            marked = self._files.marks.all()  # where that fails, rather nothing is evicted
            chosen = oldest_first(
                self._index,
                excess_bytes,
                lambda name: name == but or name.entry in marked or name.entry in self._pins,
            )
            if chosen.excess_bytes <= 0:
                self._evict([row.name for row in chosen.victims])
                return
            if chosen.seen_bytes != size_bytes:
                raise IndexOdd("the index miscounts its bytes")
            excess_bytes = chosen.excess_bytes
        raise StoreFullError(
            f"the store's limit of {megabytes(limit_bytes)} has no room for "
            f"{megabytes(needed_bytes)} more beside what must be kept ({entries} entries, "
            f"{megabytes(size_bytes)}); raise --disk-bytes by {megabytes(excess_bytes)} or more",
            needed_bytes,
        )

    def _evict(self, names: list[Name]) -> None:
        self._index.drop(names)
        for name in names:
            with contextlib.suppress(OSError):
                self._files.remove(name)
        self._tally.add("evictions", len(names))
