"""Everything that changes a store's directory: put, evict, delete, set aside, recover.

A put makes room, checks free space, writes a temporary, syncs it, renames it, syncs the directory and
then adds the index row.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from blendrag.errors import StoreError, StoreFullError, StoreUnavailableError
from blendrag.store.base import Counters, PinScope
from blendrag.store.durable import named_errors, readable_size, sync_directory
from blendrag.store.identity import is_learned
from blendrag.store.index import QUERY_WAIT_S, Index, IndexCorrupt, IndexLocked
from blendrag.store.payload_files import Name, PayloadFiles
from blendrag.store.recovery import reconcile
from blendrag.store.writers import WriterClaim, leftovers, remove

logger = logging.getLogger("blendrag.store")
_T = TypeVar("_T")

#: Free space left on the file system for the index and other programs.
RESERVE_BYTES = 4 << 20
#: Share of what the store can hold that KV learned from prompts may take.
LEARNED_SHARE = 0.25


class Pins:
    """Entries held by an open scope of this process. Thread-safe, as sets and lists are."""

    def __init__(self) -> None:
        self._scopes: list[tuple[int, PinScope]] = []
        """Each with the thread that opened it."""

    @contextmanager
    def scope(self) -> Iterator[PinScope]:
        """Hold every entry that this thread puts or protects from here to the end of the block."""
        opened = threading.get_ident(), PinScope()
        self._scopes.append(opened)
        try:
            yield opened[1]
        finally:
            self._scopes.remove(opened)

    def note_put(self, entry: tuple[str, str]) -> None:
        """An entry was put: every open scope of this thread holds it.

        What other threads put meanwhile, because a request missed it, must not fill the store for an ingest.
        """
        for thread, scope in list(self._scopes):
            if thread == threading.get_ident():
                scope.protect(*entry)

    def __contains__(self, entry: tuple[str, str]) -> bool:
        return any(entry in scope.held for _, scope in list(self._scopes))


def oldest_first(
    index: Index, excess_bytes: int, stays: Callable[[Name], bool], at_most: int = sys.maxsize
) -> dict[Name, int]:
    """The least recently used payloads that free ``excess_bytes``, or all that do not stay.

    What was learned from prompts goes first. Gives their bytes and changes nothing.
    """
    victims = learned_first(index, excess_bytes, at_most)
    excess_bytes -= sum(victims.values())
    for name, size_bytes in index.oldest() if excess_bytes > 0 else ():
        if excess_bytes <= 0 or len(victims) == at_most:
            break
        if name not in victims and not stays(name):
            victims[name] = size_bytes
            excess_bytes -= size_bytes
    return victims


def learned_first(
    index: Index, excess_bytes: int, at_most: int = sys.maxsize, adds: tuple[str, int] | None = None
) -> dict[Name, int]:
    """Payloads learned from prompts that free ``excess_bytes``, or as many as may go; and their bytes.

    The namespace that holds most gives up its least recently used ones, so that one who asks much leaves the
    others what they have. ``adds``: the namespace that wants room for so many bytes more of its own.
    """
    victims: dict[Name, int] = {}
    left = index.learned_bytes() if excess_bytes > 0 else {}
    if adds is not None:
        left[adds[0]] = left.get(adds[0], 0) + adds[1]
    waiting: dict[str, Iterator[tuple[Name, int]]] = {}
    while left and excess_bytes > 0 and len(victims) < at_most:
        most = max(left, key=lambda namespace: left[namespace])
        if most not in waiting:
            waiting[most] = iter(index.oldest_in(most))
        found = next(waiting[most], None)
        if found is None:
            if adds is not None:
                break
            del left[most]
            continue
        name, size_bytes = found
        victims[name] = size_bytes
        left[most] -= size_bytes
        excess_bytes -= size_bytes
    return victims


class DiskWriter:
    """The writing side of one store. Thread-safe."""

    def __init__(
        self,
        root: Path,
        limit_bytes: Callable[[], int],
        before_eviction: Callable[[], None] = lambda: None,
    ) -> None:
        """``limit_bytes`` gives the current limit; ``before_eviction`` updates the order of use."""
        self.root = root
        with named_errors(f"opening store {root}"):
            self.files = PayloadFiles(root)
        self.index = Index(root / "index")
        self.pins, self.counters = Pins(), Counters()
        self._tmp = root / "tmp"
        self._limit_bytes = limit_bytes
        self._before_eviction = before_eviction
        self._claim: WriterClaim | None = None
        _writers.add(self)

    def open(self) -> None:
        """Open the index; rebuild it if it is not sound and complete, or a writer has crashed.

        If that fails, chunks are found by listing directories, and the next put tries again.
        """
        try:
            with named_errors(f"opening store {self.root}"), self.index.exclusive():
                try:
                    if any(leftovers(self._tmp)):
                        raise IndexCorrupt("a writer has crashed")
                    self.index.open()
                except IndexCorrupt:
                    self._rebuild()
        except StoreError as exc:
            logger.warning("%s; chunks are found by listing directories meanwhile", exc)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the claim to be writing, and release index and files. Idempotent."""
        if self._claim is not None:
            self._claim.close()
        self.index.close()
        self.files.close()

    def leave_to_parent(self) -> None:
        """In a forked child: let go of the lock on the parent's marker, or a crash would be hidden.

        Closing SQLite's connections in the child would disturb the parent's locks, so they are kept.
        """
        _inherited.append(self.index)
        if self._claim is not None:
            self._claim.close()

    # -- put -------------------------------------------------------------------------------------

    def put(self, name: Name, buffers: Iterable[Any], size_bytes: int) -> bool:
        """Write one payload and index it. A failure, also of ``buffers``, leaves nothing.

        What was learned from prompts makes room for everything else, also if the disk is full. Returns
        ``False`` if another process cleared the store before the payload was indexed.
        """
        while True:
            try:
                return self._put(name, buffers, size_bytes)
            except StoreFullError:
                may = isinstance(buffers, Sequence) and not is_learned(name.namespace)
                if not (may and self.give_up_learned(size_bytes)):
                    raise

    def _put(self, name: Name, buffers: Iterable[Any], size_bytes: int) -> bool:
        with named_errors(f"writing to store {self.root}", size_bytes):
            claim = self.with_index(partial(self._begin, name, size_bytes))
            self._require_space(name, size_bytes)
            try:
                self.files.write(name, claim.temporary(), buffers)
                return self.with_index(partial(self._finish, name, size_bytes))
            except BaseException:
                with contextlib.suppress(OSError):
                    self.files.remove(name)
                raise

    def _begin(self, name: Name, size_bytes: int) -> WriterClaim:
        claim = self._claimed()
        self._make_room(size_bytes, name)
        return claim

    def _claimed(self) -> WriterClaim:
        """This process's claim, by which a crash is noticed. Caller holds the index lock."""
        if self._claim is None:
            sync_directory(self.root)  # kv/ and pinned/: their creator may have been interrupted
            self._claim = WriterClaim(self._tmp, make_durable=self.index.sync)
        return self._claim

    def _finish(self, name: Name, size_bytes: int) -> bool:
        """Index what was written, unless another writer was faster; whether there is an entry now.

        Caller holds the index lock, as in :meth:`_begin`.
        """
        other = self.index.get(*name.entry)
        is_ours = other == name  # indexed by a recovery elsewhere
        if other is not None and not is_ours and self.keep(other):
            self.files.remove(name)
            return True
        if self.files.is_gone(name):
            return False
        self._make_room(0 if is_ours else size_bytes, name, is_written=True)
        self.index.add(name, size_bytes)
        return True

    def keep(self, name: Name) -> bool:
        """Make durable what another process may still be putting; whether it is there."""
        with named_errors(f"writing to store {self.root}"):
            try:
                self.files.sync(name.shard)
            except FileNotFoundError:
                return False
        return self.files.exists(name)

    def pin(self, namespace: str, key: str) -> None:
        """Keep a key out of every eviction, by any process."""
        with named_errors(f"writing to store {self.root}", 4096), self._usable_index():
            self._claimed()  # makes pinned/ durable
            self.files.pinned.add(namespace, key)

    # -- room ------------------------------------------------------------------------------------

    def learned_limit_bytes(self, written_bytes: int = 0) -> int:
        """See :meth:`KVStore.learned_limit_bytes`. ``written_bytes`` are on the disk and not in the index."""
        _, size_bytes = self.index.totals()
        others_bytes = size_bytes - sum(self.index.learned_bytes().values())
        free_bytes = max(0, self._free_bytes() - RESERVE_BYTES)
        room_bytes = size_bytes + written_bytes + free_bytes
        capacity_bytes = min(self._limit_bytes(), room_bytes)
        return max(0, min(int(LEARNED_SHARE * capacity_bytes), capacity_bytes - others_bytes))

    def give_up_learned(self, size_bytes: int) -> bool:
        """See :meth:`KVStore.give_up_learned`."""

        def give_up() -> bool:
            self._before_eviction()
            victims = learned_first(self.index, size_bytes)
            for name in victims:  # first: on a full disk there may be no room to change the index
                self.files.remove(name)
            self.index.drop(victims)
            self.counters.add("evictions", len(victims))
            return bool(victims)

        with named_errors(f"deleting from store {self.root}"):
            return self.with_index(give_up)

    def _free_bytes(self) -> int:
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    def _require_space(self, name: Name, size_bytes: int) -> None:
        """Raise :class:`StoreFullError` unless the file system has the space and some reserve.

        What was learned from prompts makes room for other KV.
        """
        needed_bytes = size_bytes + RESERVE_BYTES
        while (free_bytes := self._free_bytes()) < needed_bytes:
            is_last = is_learned(name.namespace)
            if is_last or not self.give_up_learned(needed_bytes - free_bytes):
                raise StoreFullError(
                    f"the disk of store {self.root} has {readable_size(free_bytes)} left, expected "
                    f"{readable_size(needed_bytes)}; free some space or choose another store",
                    needed_bytes,
                )

    def _make_room(
        self, needed_bytes: int, put: Name | None = None, is_written: bool = False
    ) -> None:
        """Evict the least recently used until ``needed_bytes`` fit, but not the entry ``put``, which needs
        them; ``is_written``: its file is there.

        Evicts nothing and raises :class:`StoreFullError` if that is impossible. Caller holds the
        index lock.
        """
        if put is not None and is_learned(put.namespace):
            return self._make_learned_room(put.namespace, needed_bytes, is_written)
        entries, size_bytes = self.index.totals()
        limit_bytes = self._limit_bytes()
        excess_bytes = size_bytes + needed_bytes - limit_bytes
        if excess_bytes <= 0:
            return None
        if needed_bytes <= limit_bytes:
            self._before_eviction()
            pinned = self.files.pinned.all()  # if that fails, nothing is evicted
            victims = oldest_first(
                self.index,
                excess_bytes,
                lambda name: name == put or name.entry in pinned or name.entry in self.pins,
            )
            excess_bytes -= sum(victims.values())
            if excess_bytes <= 0:
                return self._evict(victims)
            if sum(row_bytes for _, row_bytes in self.index.oldest()) != size_bytes:
                raise IndexCorrupt("it miscounts its bytes")
        raise StoreFullError(
            f"the store's limit of {readable_size(limit_bytes)} has no room for "
            f"{readable_size(needed_bytes)} more next to what must be kept ({entries} entries, "
            f"{readable_size(size_bytes)}); raise disk_bytes by {readable_size(excess_bytes)} or more",
            needed_bytes,
        )

    def _make_learned_room(self, namespace: str, needed_bytes: int, is_written: bool) -> None:
        """:meth:`_make_room` for KV learned from prompts, which takes the place of nothing else."""
        limit_bytes = self.learned_limit_bytes(needed_bytes if is_written else 0)
        excess_bytes = sum(self.index.learned_bytes().values()) + needed_bytes - limit_bytes
        if excess_bytes <= 0 or not needed_bytes:
            return
        self._before_eviction()
        victims = learned_first(self.index, excess_bytes, adds=(namespace, needed_bytes))
        if sum(victims.values()) < excess_bytes:
            raise StoreFullError(
                f"store {self.root} has no room for {readable_size(needed_bytes)} of KV learned from "
                f"prompts, which may take {readable_size(limit_bytes)}; raise disk_bytes or free some space",
                needed_bytes,
            )
        self._evict(victims)

    def _evict(self, victims: dict[Name, int]) -> None:
        self.index.drop(victims)
        for name in victims:
            with contextlib.suppress(OSError):
                self.files.remove(name)
        self.counters.add("evictions", len(victims))

    # -- removal ---------------------------------------------------------------------------------

    def delete(self, namespace: str, key: str) -> bool:
        """Remove an entry and its pin; whether there was one."""
        with named_errors(f"deleting from store {self.root}"), self._usable_index():
            names = self.files.named(namespace, key)
            self.files.pinned.remove(namespace, key)
            self.remove(names)
        return bool(names)

    def remove(self, names: list[Name]) -> None:
        """Remove several payloads; their pins stay."""

        def remove() -> None:
            self._claimed()
            self.index.drop(names)
            for name in names:
                self.files.remove(name)

        with named_errors(f"deleting from store {self.root}"):
            self.with_index(remove)

    def quarantine(self, name: Name) -> None:
        """Set a payload aside. Called while a query runs: waits only briefly, never fails."""
        with contextlib.suppress(OSError):
            self.files.quarantine(name)
        self.drop_row(name)

    def drop_row(self, name: Name) -> None:
        """Forget a payload that is gone; best effort."""
        with contextlib.suppress(StoreError, OSError), self.index.exclusive(QUERY_WAIT_S):
            self.index.drop([name])

    def touch(self, used: Iterable[tuple[str, str]]) -> None:
        """Mark entries as used most recently, in this order; best effort."""
        with contextlib.suppress(StoreError, OSError), self.index.exclusive(QUERY_WAIT_S):
            self.index.touch(used)

    # -- recovery --------------------------------------------------------------------------------

    def recover(self) -> None:
        """Make index and files agree, remove what crashed writers left, evict to the limit.

        Safe while others use the store.
        """
        with named_errors(f"recovering store {self.root}"), self._usable_index():
            self._rebuild()

    def _rebuild(self) -> None:
        """:meth:`recover`. If it is interrupted, the next process to open the store repeats it.

        Caller holds the index lock.
        """
        markers, parts = leftovers(self._tmp)
        remove(parts)
        self.index.rebuild(
            lambda: self.counters.add("quarantined", reconcile(self.files, self.index))
        )
        with contextlib.suppress(StoreFullError):
            self._make_room(0)
        if self.index.sync():  # or the rows could be lost, and with the markers any trace of that
            remove(markers)

    def with_index(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` under the index lock, once more after a rebuild if the index is corrupt."""
        with self._usable_index():
            try:
                return action()
            except IndexCorrupt:
                self.recover()
                return action()

    @contextmanager
    def _usable_index(self) -> Iterator[None]:
        """The index lock, or :class:`StoreUnavailableError` after a bounded wait."""
        try:
            with self.index.exclusive():
                yield
        except IndexLocked as exc:
            raise StoreUnavailableError(str(exc)) from exc
        except IndexCorrupt as exc:
            raise StoreUnavailableError(
                f"the index of store {self.root} cannot be rebuilt ({exc}), expected a working disk; "
                "check it or choose another store"
            ) from exc


_writers: weakref.WeakSet[DiskWriter] = weakref.WeakSet()
_inherited: list[object] = []


def _leave_to_parent() -> None:
    for writer in list(_writers):
        writer.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
