"""Everything that changes a store's directory: put, evict, delete, set aside, recover.

Owns the order of steps that makes a put atomic and durable: make room, check free space, write a
temporary, fsync, rename, fsync the directory, index. Knows nothing of tensors or of reading.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from blendrag.errors import StoreError, StoreFullError, StoreUnavailableError
from blendrag.store.directories import sync_directory
from blendrag.store.disk_errors import named_errors
from blendrag.store.files import Name, PayloadFiles
from blendrag.store.forking import renew_after_fork
from blendrag.store.index import Index
from blendrag.store.index_database import QUERY_WAIT_S
from blendrag.store.index_errors import IndexLocked, IndexOdd
from blendrag.store.recovery import reconcile
from blendrag.store.room import Room
from blendrag.store.rows import Row
from blendrag.store.tally import Tally
from blendrag.store.writers import Writer, leftovers, remove

logger = logging.getLogger("blendrag.store")
_T = TypeVar("_T")


class DiskWriter:
    """The writing side of one :class:`DiskStore`. Thread-safe."""

    def __init__(
        self,
        root: Path,
        files: PayloadFiles,
        index: Index,
        room: Room,
        tally: Tally,
    ) -> None:
        self._root = root
        self._tmp = root / "tmp"
        self._files = files
        self._index = index
        self._tally = tally
        self._room = room
        self.renew_locks()
        renew_after_fork(self)

    def renew_locks(self) -> None:
        """See :mod:`forking`. A child that kept its parent's claim would keep it alive."""
        self._claim: Writer | None = None

    def open(self) -> None:
        """Open the index; rebuild it unless it is sound and complete and no writer has crashed.

        Without an index, chunks are found by listing directories, and the next put tries again.
        """
        try:
            with named_errors(f"opening store {self._root}"), self._index.exclusive():
                if any(leftovers(self._tmp)) or not self._index.open():
                    self._rebuild()
        except StoreError as exc:
            logger.warning("%s; chunks are found by listing directories meanwhile", exc)

    def close(self) -> None:
        """Say that nothing is left unfinished. Idempotent."""
        if self._claim is not None:
            self._claim.close()

    # -- put -------------------------------------------------------------------------------------

    def put(self, name: Name, buffers: Iterable[Any], size_bytes: int) -> bool:
        """Write one payload and index it; on any failure, also of ``buffers``, nothing of it is left.

        ``False`` where others, who cleared or mended the store, removed it before it was indexed."""
        with named_errors(f"writing to store {self._root}", size_bytes):
            claim = self._with_index(partial(self._begin, size_bytes))
            self._room.require_on_disk(size_bytes)
            try:
                self._files.write(name, claim.temporary(), buffers)
                return self._with_index(partial(self._finish, Row(name, size_bytes)))
            except BaseException:
                with contextlib.suppress(OSError):
                    self._files.remove(name)
                raise

    def keep(self, name: Name) -> bool:
        """Make durable what somebody else may still be putting; whether it is there to be kept."""
        with named_errors(f"writing to store {self._root}"):
            if self._claim is None:
                self._files.forget_directories()
            return self._keep(name)

    def _keep(self, name: Name) -> bool:
        try:
            self._files.sync(name)
        except FileNotFoundError:
            return False
        return self._files.exists(name)

    def _begin(self, size_bytes: int) -> Writer:
        """Claim to be writing and make room. Caller holds the index lock."""
        claim = self._claimed()
        self._room.make(size_bytes)
        return claim

    def _claimed(self) -> Writer:
        """This process's claim: whatever is cut short, somebody will notice, and no directory is
        removed that is known to be durable; what was known before is not. Caller holds the index lock.
        """
        if self._claim is None:
            sync_directory(self._root)  # kv/ and pinned/: whoever made them may not have
            claim = Writer(self._tmp, make_durable=self._index.sync)
            self._files.forget_directories()
            self._claim = claim
        return self._claim

    def _finish(self, row: Row) -> bool:
        """Index what was written, unless somebody was faster; whether there is one now. Caller holds
        the index lock."""
        other = self._index.get(row.name.namespace, row.name.key)
        is_ours = other is not None and other.name == row.name  # a recovery elsewhere was faster
        if other is not None and not is_ours and self._keep(other.name):
            self._files.remove(row.name)
            return True
        if self._files.is_gone(row.name):
            return False
        self._room.make(0 if is_ours else row.size_bytes, but=row.name)
        self._index.add(row)
        return True

    def pin(self, namespace: str, key: str) -> None:
        """Keep a key out of every eviction, by whichever process."""
        with named_errors(f"writing to store {self._root}", 4096):
            self._with_index(self._claimed)  # pinned/ itself is durable then
            self._with_index(partial(self._files.marks.add, namespace, key))

    # -- removal and recovery --------------------------------------------------------------------

    def delete(self, namespace: str, key: str) -> bool:
        """Drop an entry; whether there was one."""
        with named_errors(f"deleting from store {self._root}"):
            return self._with_index(partial(self._delete, namespace, key))

    def _delete(self, namespace: str, key: str) -> bool:
        """Caller holds the index lock."""
        self._claimed()
        names = self._files.named(namespace, key)
        self._files.marks.remove(namespace, key)
        self._remove(names)
        return bool(names)

    def remove(self, names: list[Name]) -> None:
        """Drop many payloads at once; their pins stay."""
        with named_errors(f"deleting from store {self._root}"):
            self._with_index(partial(self._remove, names))

    def _remove(self, names: list[Name]) -> None:
        """Caller holds the index lock."""
        self._claimed()
        self._index.drop(names)
        for name in names:
            self._files.remove(name)

    def remove_empty_directories(self, namespace: str | None) -> None:
        """Of a namespace or of all, unless somebody else is writing: see :meth:`_claimed`.

        What is written meanwhile could else lie in a directory that was made anew, taken for the
        durable one it replaces, and be acknowledged.
        """
        with named_errors(f"deleting from store {self._root}"):
            self._with_index(partial(self._remove_empty_directories, namespace))

    def _remove_empty_directories(self, namespace: str | None) -> None:
        """Caller holds the index lock."""
        if self._claimed().is_alone():
            self._files.remove_empty_directories(namespace)

    def quarantine(self, name: Name) -> None:
        """Set a payload aside. Called while a query runs: waits for nobody long, never fails."""
        with contextlib.suppress(OSError):
            self._files.quarantine(name)
        self.drop_row(name)

    def drop_row(self, name: Name) -> None:
        """Forget a payload that is gone; best effort."""
        with contextlib.suppress(StoreError, OSError), self._index.exclusive(QUERY_WAIT_S):
            self._index.drop([name])

    def touch(self, used: dict[tuple[str, str], None]) -> None:
        """Move entries to the end of the queue for eviction, in this order; best effort."""
        with contextlib.suppress(StoreError, OSError), self._index.exclusive(QUERY_WAIT_S):
            self._index.touch(used)

    def recover(self) -> None:
        """Rebuild the index from the files where it is odd, drop dead rows, clear what crashed
        writers left, evict to the limit. Safe while others use the store."""
        with named_errors(f"recovering store {self._root}"), self._usable_index():
            self._rebuild()

    def _rebuild(self) -> None:
        """:meth:`recover`, as often as it takes: cut short, it is done by whoever opens the store
        next. Caller holds the index lock."""
        left = leftovers(self._tmp)
        remove(left.parts)
        self._files.forget_directories()
        with self._index.unfinished():
            try:
                if not self._index.connect():
                    self._index.create()
                self._reconcile()
            except IndexOdd as exc:
                logger.warning("%s: the index is rebuilt from the files", exc)
                self._index.create()
                self._reconcile()
        remove(left.markers)

    def _reconcile(self) -> None:
        """Caller holds the index lock."""
        self._tally.add("quarantined", reconcile(self._files, self._index))
        with contextlib.suppress(StoreFullError):
            self._room.make(0)

    def _with_index(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` under the index lock, after a rebuild should the index turn out odd."""
        with self._usable_index():
            try:
                return action()
            except IndexOdd:
                self.recover()
                return action()

    @contextlib.contextmanager
    def _usable_index(self) -> Iterator[None]:
        """The index lock, or :class:`StoreUnavailableError` after a bounded wait."""
        try:
            with self._index.exclusive():
                yield
        except IndexLocked as exc:
            raise StoreUnavailableError(str(exc)) from exc
