"""Everything that changes a store's directory: put, evict, delete, set aside, recover.

A put makes room, checks free space, writes a temporary, syncs it, renames it, syncs the directory and
then adds the index row. Knows no tensors and no reading, and imports no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from blendrag.errors import StoreError, StoreFullError, StoreUnavailableError
from blendrag.store.base import Counters
from blendrag.store.durable import megabytes, named_errors, sync_directory
from blendrag.store.index import QUERY_WAIT_S, Index, IndexCorrupt, IndexLocked, IndexRow
from blendrag.store.payload_files import Name, PayloadFiles
from blendrag.store.recovery import reconcile
from blendrag.store.writers import WriterClaim, leftovers, remove

logger = logging.getLogger("blendrag.store")
_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Free space left on the file system for the index and other programs.
RESERVE_BYTES = 4 << 20


# -- what is not evicted now ---------------------------------------------------------------------


class Scope:
    """One open :meth:`Pins.scope`; see :class:`blendrag.store.base.PinScope`."""

    def __init__(self) -> None:
        self.held: set[tuple[str, str]] = set()

    def protect(self, namespace: str, key: str) -> None:
        self.held.add((namespace, key))


class Pins:
    """Entries held by an open scope of this process. Thread-safe, as sets and lists are."""

    def __init__(self) -> None:
        self._scopes: list[Scope] = []

    @contextmanager
    def scope(self) -> Iterator[Scope]:
        """Hold every entry that is put or protected from here to the end of the block."""
        scope = Scope()
        self._scopes.append(scope)
        try:
            yield scope
        finally:
            self._scopes.remove(scope)

    def note_put(self, entry: tuple[str, str]) -> None:
        """An entry was put: every open scope holds it."""
        for scope in list(self._scopes):
            scope.held.add(entry)

    def __contains__(self, entry: tuple[str, str]) -> bool:
        return any(entry in scope.held for scope in list(self._scopes))


class Victims(NamedTuple):
    """What to evict."""

    rows: list[IndexRow]
    excess_bytes: int
    """Bytes still too many after the eviction, if positive."""
    seen_bytes: int
    """Bytes of all rows that were considered."""


def oldest_first(
    index: Index, excess_bytes: int, stays: Callable[[Name], bool], at_most: int = sys.maxsize
) -> Victims:
    """Choose the least recently used until ``excess_bytes`` would be freed. Changes nothing."""
    victims: list[IndexRow] = []
    seen_bytes = 0
    for row in index.oldest() if excess_bytes > 0 else ():
        if excess_bytes <= 0 or len(victims) == at_most:
            break
        seen_bytes += row.size_bytes
        if not stays(row.name):
            victims.append(row)
            excess_bytes -= row.size_bytes
    return Victims(victims, excess_bytes, seen_bytes)


# -- the writer ----------------------------------------------------------------------------------


def _with_index(
    method: Callable[Concatenate[DiskWriter, _P], _T],
) -> Callable[Concatenate[DiskWriter, _P], _T]:
    """Run a method under the index lock, once more after a rebuild if the index is corrupt."""

    @wraps(method)
    def run(self: DiskWriter, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._usable_index():
            try:
                return method(self, *args, **kwargs)
            except IndexCorrupt:
                self.recover()
                return method(self, *args, **kwargs)

    return run


class DiskWriter:
    """The writing side of one store. Thread-safe."""

    def __init__(
        self,
        root: Path,
        files: PayloadFiles,
        index: Index,
        limit_bytes: Callable[[], int],
        pins: Pins,
        counters: Counters,
        before_eviction: Callable[[], None] = lambda: None,
    ) -> None:
        """``limit_bytes`` gives the current limit; ``before_eviction`` updates the order of use."""
        self._root = root
        self._tmp = root / "tmp"
        self._files = files
        self._index = index
        self._limit_bytes = limit_bytes
        self._pins = pins
        self._counters = counters
        self._before_eviction = before_eviction
        self._claim: WriterClaim | None = None
        _writers.add(self)

    def open(self) -> None:
        """Open the index; rebuild it if it is not sound and complete, or a writer has crashed.

        If that fails, chunks are found by listing directories, and the next put tries again.
        """
        try:
            with named_errors(f"opening store {self._root}"), self._index.exclusive():
                try:
                    if any(leftovers(self._tmp)):
                        raise IndexCorrupt("a writer has crashed")
                    self._index.open()
                except IndexCorrupt:
                    self._rebuild()
        except StoreError as exc:
            logger.warning("%s; chunks are found by listing directories meanwhile", exc)

    def close(self) -> None:
        """End the claim to be writing. Idempotent."""
        if self._claim is not None:
            self._claim.close()

    def leave_to_parent(self) -> None:
        """In a forked child: let go of the lock on the parent's marker, keep its SQLite connections.

        Otherwise the child would keep the marker locked, and hide a crash of its parent.
        """
        _inherited.append(self._index.connections())
        self.close()

    # -- put -------------------------------------------------------------------------------------

    def put(self, name: Name, buffers: Iterable[Any], size_bytes: int) -> bool:
        """Write one payload and index it. A failure, also of ``buffers``, leaves nothing behind.

        Returns ``False`` if another process cleared the store before the payload was indexed.
        """
        with named_errors(f"writing to store {self._root}", size_bytes):
            claim = self._begin(size_bytes)
            self._require_space(size_bytes)
            try:
                self._files.write(name, claim.temporary(), buffers)
                return self._finish(IndexRow(name, size_bytes))
            except BaseException:
                with contextlib.suppress(OSError):
                    self._files.remove(name)
                raise

    @_with_index
    def _begin(self, size_bytes: int) -> WriterClaim:
        claim = self._claimed()
        self._make_room(size_bytes)
        return claim

    def _claimed(self) -> WriterClaim:
        """This process's claim, by which a crash is noticed. Caller holds the index lock."""
        if self._claim is None:
            sync_directory(self._root)  # kv/ and pinned/: their creator may have been interrupted
            self._claim = WriterClaim(self._tmp, make_durable=self._index.sync)
        return self._claim

    @_with_index
    def _finish(self, row: IndexRow) -> bool:
        """Index what was written, unless another writer was faster; whether there is an entry now."""
        other = self._index.get(*row.name.entry)
        is_ours = other is not None and other.name == row.name  # indexed by a recovery elsewhere
        if other is not None and not is_ours and self.keep(other.name):
            self._files.remove(row.name)
            return True
        if self._files.is_gone(row.name):
            return False
        self._make_room(0 if is_ours else row.size_bytes, but=row.name)
        self._index.add(row)
        return True

    def keep(self, name: Name) -> bool:
        """Make durable what another process may still be putting; whether it is there."""
        with named_errors(f"writing to store {self._root}"):
            try:
                self._files.sync(name)
            except FileNotFoundError:
                return False
        return self._files.exists(name)

    @_with_index
    def pin(self, namespace: str, key: str) -> None:
        """Keep a key out of every eviction, by any process."""
        with named_errors(f"writing to store {self._root}", 4096):
            self._claimed()  # makes pinned/ durable
            self._files.pinned.add(namespace, key)

    # -- room ------------------------------------------------------------------------------------

    def _require_space(self, size_bytes: int) -> None:
        """Raise :class:`StoreFullError` unless the file system has the space and some reserve."""
        status = os.statvfs(self._root)
        free_bytes = status.f_bavail * status.f_frsize
        needed_bytes = size_bytes + RESERVE_BYTES
        if free_bytes < needed_bytes:
            raise StoreFullError(
                f"the disk of store {self._root} has {megabytes(free_bytes)} left, expected "
                f"{megabytes(needed_bytes)}; free some space or choose another --store",
                needed_bytes,
            )

    def _make_room(self, needed_bytes: int, but: Name | None = None) -> None:
        """Evict the least recently used until ``needed_bytes`` fit, but not the entry ``but``.

        Evicts nothing and raises :class:`StoreFullError` if that is impossible. Caller holds the
        index lock.
        """
        entries, size_bytes = self._index.totals()
        limit_bytes = self._limit_bytes()
        excess_bytes = size_bytes + needed_bytes - limit_bytes
        if excess_bytes <= 0:
            return
        if needed_bytes <= limit_bytes:
            self._before_eviction()
            pinned = self._files.pinned.all()  # if that fails, nothing is evicted
            victims = oldest_first(
                self._index,
                excess_bytes,
                lambda name: name == but or name.entry in pinned or name.entry in self._pins,
            )
            if victims.excess_bytes <= 0:
                self._evict([row.name for row in victims.rows])
                return
            if victims.seen_bytes != size_bytes:
                raise IndexCorrupt("it miscounts its bytes")
            excess_bytes = victims.excess_bytes
        raise StoreFullError(
            f"the store's limit of {megabytes(limit_bytes)} has no room for "
            f"{megabytes(needed_bytes)} more next to what must be kept ({entries} entries, "
            f"{megabytes(size_bytes)}); raise --disk-bytes by {megabytes(excess_bytes)} or more",
            needed_bytes,
        )

    def _evict(self, names: list[Name]) -> None:
        self._index.drop(names)
        for name in names:
            with contextlib.suppress(OSError):
                self._files.remove(name)
        self._counters.add("evictions", len(names))

    # -- removal ---------------------------------------------------------------------------------

    @_with_index
    def delete(self, namespace: str, key: str) -> bool:
        """Remove an entry and its pin; whether there was one."""
        with named_errors(f"deleting from store {self._root}"):
            self._claimed()
            names = self._files.named(namespace, key)
            self._files.pinned.remove(namespace, key)
            self.remove(names)
        return bool(names)

    @_with_index
    def remove(self, names: list[Name]) -> None:
        """Remove several payloads; their pins stay."""
        with named_errors(f"deleting from store {self._root}"):
            self._claimed()
            self._index.drop(names)
            for name in names:
                self._files.remove(name)

    def quarantine(self, name: Name) -> None:
        """Set a payload aside. Called while a query runs: waits only briefly, never fails."""
        with contextlib.suppress(OSError):
            self._files.quarantine(name)
        self.drop_row(name)

    def drop_row(self, name: Name) -> None:
        """Forget a payload that is gone; best effort."""
        with contextlib.suppress(StoreError, OSError), self._index.exclusive(QUERY_WAIT_S):
            self._index.drop([name])

    def touch(self, used: Iterable[tuple[str, str]]) -> None:
        """Mark entries as used most recently, in this order; best effort."""
        with contextlib.suppress(StoreError, OSError), self._index.exclusive(QUERY_WAIT_S):
            self._index.touch(used)

    # -- recovery --------------------------------------------------------------------------------

    def recover(self) -> None:
        """Make index and files agree, remove what crashed writers left, evict to the limit.

        Safe while others use the store.
        """
        with named_errors(f"recovering store {self._root}"), self._usable_index():
            self._rebuild()

    def _rebuild(self) -> None:
        """:meth:`recover`. If it is interrupted, the next process to open the store repeats it.

        Caller holds the index lock.
        """
        markers, parts = leftovers(self._tmp)
        remove(parts)
        self._index.rebuild(self._reconcile)
        with contextlib.suppress(StoreFullError):
            self._make_room(0)
        if self._index.sync():  # or the rows could be lost, and with the markers any trace of that
            remove(markers)

    def _reconcile(self) -> None:
        self._counters.add("quarantined", reconcile(self._files, self._index))

    @_with_index
    def with_index(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` under the index lock, once more after a rebuild if the index is corrupt."""
        return action()

    @contextmanager
    def _usable_index(self) -> Iterator[None]:
        """The index lock, or :class:`StoreUnavailableError` after a bounded wait."""
        try:
            with self._index.exclusive():
                yield
        except IndexLocked as exc:
            raise StoreUnavailableError(str(exc)) from exc
        except IndexCorrupt as exc:
            raise StoreUnavailableError(
                f"the index of store {self._root} cannot be rebuilt ({exc}), expected a working disk; "
                "check it or choose another --store"
            ) from exc


_writers: weakref.WeakSet[DiskWriter] = weakref.WeakSet()
_inherited: list[object] = []


def _leave_to_parent() -> None:
    for writer in list(_writers):
        writer.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
