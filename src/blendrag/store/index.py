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
import filelock

from blendrag.errors import StoreError, StoreFullError
from blendrag.sqlite_errors import is_out_of_space, primary_code
from blendrag.store.files import Name
from blendrag.store.index_check import DATABASE, DATABASE_FILES, SETTINGS, fault
from blendrag.store.rows import IndexOdd, Row, RowCache, Rows, row_key

logger = logging.getLogger("blendrag.store")

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_FOREIGN = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
#: Caches inherited through fork: closing them in the child could disturb the parent's locks.
_INHERITED: list[diskcache.Cache] = []


class IndexLocked(StoreError):
    """Somebody holds the index, or the disk does not let us have it, for longer than we wait."""


class Index:
    """The rows of one store. Methods raise :class:`IndexLocked` or :class:`IndexOdd`."""

    def __init__(
        self, directory: Path, lock_timeout_s: float = 10.0, busy_timeout_s: float = 1.0
    ) -> None:
        self._directory = directory
        self._lock_timeout_s = lock_timeout_s
        self._busy_timeout_s = busy_timeout_s
        self._cache: diskcache.Cache | None = None
        self._cache_pid = 0
        self._inode = (0, 0)
        self._fresh_locks()

    def _fresh_locks(self) -> None:
        self._pid = os.getpid()
        self._in_transaction = False
        self._thread_lock = threading.RLock()
        self._file_lock = filelock.FileLock(self._directory / "lock", mode=0o600)

    # -- locking and opening -----------------------------------------------------------------

    @contextlib.contextmanager
    def exclusive(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the index against all other writers, in this process and others. Reentrant."""
        if self._pid != os.getpid():
            self._fresh_locks()
        wait_s = self._lock_timeout_s if timeout_s is None else timeout_s
        if not self._thread_lock.acquire(timeout=wait_s):
            raise IndexLocked(f"index {self._directory} is held by another thread for {wait_s} s")
        try:
            try:
                self._file_lock.acquire(timeout=wait_s, poll_interval=0.005)
            except (filelock.Timeout, OSError) as exc:
                raise IndexLocked(
                    f"index {self._directory} is held by another process for {wait_s} s"
                ) from exc
            try:
                yield
            finally:
                self._file_lock.release()
        finally:
            self._thread_lock.release()

    def open(self) -> bool:
        """Check and open the database, set an odd one aside; whether the index is a new one.

        Caller holds :meth:`exclusive`.
        """
        self._forget()
        path = self._directory / DATABASE
        with _mapped():
            is_new = not os.path.lexists(path)
            reason = None if is_new else fault(self._directory, self._busy_timeout_s)
        if reason is not None:
            logger.warning("index of the store is odd (%s): rebuilt from the files", reason)
        if reason is not None or is_new:
            self.set_aside()
        self._connect()
        return reason is not None or is_new

    def set_aside(self) -> None:
        """Move the database to the quarantine. Caller holds :meth:`exclusive`."""
        self._forget()
        for name in DATABASE_FILES:
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._directory / name, self._directory.parent / "quarantine" / name)

    def _connect(self) -> None:
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                with _mapped():
                    self._cache = RowCache(
                        str(self._directory), self._busy_timeout_s, disk=Rows, **SETTINGS
                    )
                    status = os.stat(self._directory / DATABASE)
                self._inode = (status.st_dev, status.st_ino)
                self._cache_pid = os.getpid()
                return
            except IndexLocked:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def _current(self) -> diskcache.Cache:
        """The open cache, provided that it is this process's and still the file on disk."""
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
        with self.exclusive():
            if self._cache is cache and self.open():
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
        with _mapped():
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
        with _mapped():
            cache = self._current()
            for key in cache:
                value = cache.get(key)
                if value is None:
                    continue
                row = Row.decode(value)
                if row_key(row.name.namespace, row.name.key) != key:
                    raise IndexOdd("an index row belongs to another key")
                yield row

    def totals(self) -> tuple[int, int]:
        """Entries and bytes, as SQLite counts them within the same transactions."""
        with _mapped():
            cache = self._current()
            return int(cache.reset("count")), int(cache.reset("size"))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[diskcache.Cache]:
        with self.exclusive(), _mapped():
            cache = self._current()
            if self._in_transaction:
                yield cache
                return
            self._in_transaction = True
            try:
                with cache.transact():
                    yield cache
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    cache.close()  # a failed COMMIT must not leave a transaction open
                raise
            finally:
                self._in_transaction = False

    def transaction(self) -> contextlib.AbstractContextManager[Any]:
        """Several writes as one. Reentrant with the write methods."""
        return self._writing()

    def sync(self) -> None:
        """Make all rows durable; SQLite alone leaves the last ones to the next checkpoint."""
        sync_database(self._directory)

    def close(self) -> None:
        """Release the database. Idempotent."""
        self._forget()


def sync_database(directory: Path) -> None:
    """fsync the database files in ``directory``."""
    for name in DATABASE_FILES[:2]:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


@contextlib.contextmanager
def _mapped() -> Iterator[None]:
    """SQLite's and diskcache's errors as ours."""
    try:
        yield
    except diskcache.Timeout as exc:
        raise IndexLocked("the index database is locked") from exc
    except sqlite3.Error as exc:
        if is_out_of_space(exc):
            raise StoreFullError(
                "no space left for the index of the store; free some space", 1 << 20
            ) from exc
        if primary_code(exc) in (*_BUSY, *_FOREIGN):
            raise IndexLocked(f"the index cannot be used now ({exc})") from exc
        raise IndexOdd(f"the index is odd ({exc})") from exc
