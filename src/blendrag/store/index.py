"""A disposable index over the payload files: which there are, how large, how recently used.

diskcache is used for its SQLite table and nothing more: its serialisation is replaced by
:class:`Rows`, its eviction is off, its endless retries are cut. Anything odd in the database is
:class:`IndexOdd`, and the store rebuilds the index from the files.

The order of rows is the logical clock: an entry put or used goes to the end. No time of day is
ever compared. Writes happen under one lock across threads and processes, because SQLite up to
3.51.2 can corrupt a WAL that is written and checkpointed at once. Nothing is carried across fork.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import diskcache

from blendrag.errors import StoreError
from blendrag.store.files import Name
from blendrag.store.index_check import DATABASE, fault
from blendrag.store.index_errors import IndexLocked, IndexOdd, mapped, unusable
from blendrag.store.index_files import UNFINISHED, exists, mark_unfinished, set_aside
from blendrag.store.index_lock import IndexLock
from blendrag.store.rows import Row, RowCache, row_key

logger = logging.getLogger("blendrag.store")

#: What a query may wait for the index; without it, it finds chunks by listing directories.
QUERY_WAIT_S = 0.05
#: What a writer that is done may wait to make its rows durable; otherwise the index is rebuilt.
_SYNC_WAIT_S = 1.0
#: Caches inherited through fork: closing them in the child could disturb the parent's locks.
_INHERITED: list[diskcache.Cache] = []


class Index:
    """The rows of one store. Methods raise :class:`IndexLocked`, :class:`IndexOdd` or
    :class:`StoreFullError`."""

    def __init__(
        self, directory: Path, lock_timeout_s: float = 10.0, busy_timeout_s: float = 1.0
    ) -> None:
        self._directory = directory
        self._busy_timeout_s = busy_timeout_s
        self._cache: RowCache | None = None
        self._cache_pid = 0
        self._inode = (0, 0)
        self._schema_version = 0
        self._transaction_pid = 0
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
        return self.connect()

    def connect(self) -> bool:
        """Like :meth:`open`, of an index whose rebuild is not finished, too."""
        self._forget()
        if not exists(self._directory, DATABASE):
            return False
        try:
            with self._mapped():
                reason = fault(self._directory, self._busy_timeout_s)
            if reason is None:
                self._connect()
        except IndexOdd as exc:
            reason = str(exc)
        except OSError as exc:
            raise unusable(self._directory, exc.strerror or exc) from exc
        if reason is not None:
            logger.warning("index of the store is odd (%s): rebuilt from the files", reason)
        return reason is None

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

    # -- rows ----------------------------------------------------------------------------------

    def get(self, namespace: str, key: str) -> Row | None:
        """The row of a key. Takes no lock."""
        with self._mapped():
            value = self._current().get(row_key(namespace, key))
        if value is None:
            return None
        row = Row.decode(value)
        if row.name.namespace != namespace or row.name.key != key:
            raise IndexOdd("an index row belongs to another key")
        return row

    def add(self, row: Row) -> None:
        """Insert as the most recently used."""
        with self._writing() as cache:
            self._renew(cache, row)

    def drop(self, names: Iterable[Name]) -> None:
        """Delete the rows that point to exactly these files."""
        with self._writing() as cache:
            for name in names:
                row = self.get(name.namespace, name.key)
                if row is not None and row.name == name:
                    cache.delete(row_key(name.namespace, name.key))

    def touch(self, used: Iterable[tuple[str, str]]) -> None:
        """Move the rows of ``(namespace, key)`` to the end, in this order."""
        with self._writing() as cache:
            for namespace, key in used:
                row = self.get(namespace, key)
                if row is not None:
                    self._renew(cache, row)

    @staticmethod
    def _renew(cache: diskcache.Cache, row: Row) -> None:
        key = row_key(row.name.namespace, row.name.key)
        cache.delete(key)
        cache.set(key, row.encode())

    def oldest(self) -> Iterator[Row]:
        """All rows, least recently used first."""
        with self._mapped():
            cache = self._current()
            try:
                for key in cache:
                    value = cache.get(key)
                    if value is None:
                        continue
                    row = Row.decode(value)
                    if row_key(row.name.namespace, row.name.key) != key:
                        raise IndexOdd("an index row belongs to another key")
                    yield row
            except OverflowError as exc:  # diskcache adds one to the last row's number
                raise IndexOdd("the rows of the index are numbered out of range") from exc

    def totals(self) -> tuple[int, int]:
        """Entries and bytes, as SQLite counts them within the same transactions."""
        with self._mapped():
            cache = self._current()
            totals = cache.reset("count"), cache.reset("size")
        if not all(type(total) is int and total >= 0 for total in totals):
            raise IndexOdd("the index does not count its rows")
        return totals

    @contextlib.contextmanager
    def _writing(self) -> Iterator[diskcache.Cache]:
        with self.exclusive(), self._mapped():
            cache = self._current()
            if self._transaction_pid == os.getpid():
                yield cache
                return
            self._transaction_pid = os.getpid()
            try:
                with cache.transact():
                    if cache.schema_version() != self._schema_version:
                        raise IndexOdd("the schema of the index was changed")  # a trigger would run
                    yield cache
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    cache.close()  # a failed COMMIT must not leave a transaction open
                raise
            finally:
                self._transaction_pid = 0

    def transaction(self) -> contextlib.AbstractContextManager[Any]:
        """Several writes as one. Reentrant with the write methods."""
        return self._writing()

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
