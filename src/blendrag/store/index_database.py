"""The database of an index: is it sound, is it this process's, is it still the file that is there.

Owns the connection and the mark of a rebuild; knows no rows. Nothing is carried across fork. Anything
odd is :class:`IndexOdd`, and the store rebuilds the index from the files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import diskcache

from blendrag.errors import StoreError
from blendrag.store.index_check import DATABASE, fault
from blendrag.store.index_errors import IndexLocked, IndexOdd, mapped, unusable
from blendrag.store.index_files import UNFINISHED, exists, mark_unfinished, set_aside
from blendrag.store.index_lock import IndexLock
from blendrag.store.rows import RowCache

logger = logging.getLogger("blendrag.store")

#: What a query may wait for the index; without it, it finds chunks by listing directories.
QUERY_WAIT_S = 0.05
#: What a writer that is done may wait to make its rows durable; otherwise the index is rebuilt.
_SYNC_WAIT_S = 1.0
#: Caches inherited through fork: closing them in the child could disturb the parent's locks.
_INHERITED: list[diskcache.Cache] = []


class IndexDatabase:
    """The database of one store's index. Methods raise :class:`IndexLocked`, :class:`IndexOdd` or
    :class:`StoreFullError`."""

    def __init__(self, directory: Path, lock_timeout_s: float, busy_timeout_s: float) -> None:
        self._directory = directory
        self._busy_timeout_s = busy_timeout_s
        self._cache: RowCache | None = None
        self._cache_pid = 0
        self._inode = (0, 0)
        self._schema_version = 0
        self._rebuilding = (0, 0)
        """Process and thread within :meth:`unfinished`."""
        self._lock = IndexLock(directory, lock_timeout_s)

    def exclusive(self, timeout_s: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Hold the index against all other writers, in this process and others. Reentrant."""
        return self._lock.hold(timeout_s)

    def _mapped(self) -> contextlib.AbstractContextManager[None]:
        return mapped(self._directory, self._busy_timeout_s)

    # -- opening -----------------------------------------------------------------------------------

    def open(self) -> bool:
        """Connect to the database; ``False`` unless it is sound and knows of all files.

        Changes no row. Caller holds :meth:`exclusive`.
        """
        if exists(self._directory, UNFINISHED):
            self._forget()
            return False
        return self._oddity() is None

    def connect(self) -> bool:
        """Like :meth:`open`, of an index whose rebuild is not finished, too; says what is odd about it."""
        reason = self._oddity()
        if reason:
            logger.warning("index of the store is odd (%s): rebuilt from the files", reason)
        return reason is None

    def _oddity(self) -> str | None:
        """Connect; why that is not to be, empty where there is no database."""
        self._forget()
        if not exists(self._directory, DATABASE):
            return ""
        try:
            with self._mapped():
                reason = fault(self._directory, self._busy_timeout_s)
            if reason is None:
                self._connect()
        except IndexOdd as exc:
            return str(exc)
        except OSError as exc:
            raise unusable(self._directory, exc.strerror or exc) from exc
        return reason

    def create(self) -> None:
        """Begin an empty database in place of whatever is there, within :meth:`unfinished`."""
        self.set_aside()
        self._connect()

    @contextlib.contextmanager
    def unfinished(self) -> Iterator[None]:
        """Nobody takes the index for complete until the block has ended well and is on disk.

        Caller holds :meth:`exclusive`.
        """
        mark_unfinished(self._directory)
        self._rebuilding = (os.getpid(), threading.get_ident())
        try:
            yield
        except BaseException:
            self._forget()
            raise
        finally:
            self._rebuilding = (0, 0)
        if self.sync():
            with contextlib.suppress(OSError):
                os.unlink(self._directory / UNFINISHED)

    def set_aside(self) -> None:
        """Move the database to the quarantine. Caller holds :meth:`exclusive`."""
        self._forget()
        set_aside(self._directory)

    def _connect(self) -> None:
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                with self._mapped():
                    cache = RowCache(self._directory / DATABASE, self._busy_timeout_s)
                    self._schema_version = cache.schema_version()
                    status = os.stat(self._directory / DATABASE)
                self._inode = (status.st_dev, status.st_ino)
                self._cache, self._cache_pid = cache, os.getpid()
                return
            except IndexLocked:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def _current(self) -> RowCache:
        """The open cache, provided that it is this process's and still the file on disk."""
        pid, thread = self._rebuilding
        if pid == os.getpid() and thread != threading.get_ident():
            raise IndexLocked("the index is being rebuilt; try again in a moment")
        cache = self._cache
        if cache is None:
            raise IndexOdd("the index is not open")
        try:
            status = os.stat(self._directory / DATABASE)
        except OSError as exc:
            raise IndexOdd("the index is gone") from exc
        inode = (status.st_dev, status.st_ino)
        if self._inode == inode and self._cache_pid == os.getpid():
            return cache
        with self.exclusive(QUERY_WAIT_S):  # a writer holds it already
            if self._cache is cache and not self.open():
                raise IndexOdd("the index was lost")
        return self._current()

    def _forget(self) -> None:
        cache, self._cache = self._cache, None
        if cache is None:
            return
        if self._cache_pid == os.getpid():
            with contextlib.suppress(sqlite3.Error):
                cache.close()
        else:
            _INHERITED.append(cache)

    def sync(self) -> bool:
        """Make all rows durable, which SQLite leaves to the next checkpoint; whether they are.

        Never raises. By SQLite itself: a descriptor of ours on its files would, once closed, take
        away the locks of this process on them (https://sqlite.org/howtocorrupt.html, §2.2).
        """
        try:
            with self.exclusive(_SYNC_WAIT_S), self._mapped():
                return self._current().checkpoint()
        except StoreError as exc:
            logger.info("the index is rebuilt at the next opening: %s", exc)
            return False

    def close(self) -> None:
        """Release the database. Idempotent."""
        self._forget()
