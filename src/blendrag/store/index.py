"""The index: which payload belongs to a key, how large it is, and how recently it was used.

A SQLite database ``index/index.db`` with one row per payload. It can be thrown away at any time and
is then rebuilt from the payload files (:mod:`blendrag.store.recovery`). The column ``used`` is a
logical clock: an entry that is put or used gets the next number. Times of day are not compared.

A database is used only if its schema is exactly ours, and every row that is read is checked, so a
forged index can cause a miss or a rebuild and nothing else. All writes happen under one lock across
threads and processes, because SQLite up to 3.51.2 can corrupt a WAL that is written and checkpointed
at the same time (https://sqlite.org/wal.html#walresetbug).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import filelock

from blendrag.errors import StoreError, StoreFullError, is_out_of_space, sqlite_code
from blendrag.store.databases import database_uri, keep_private, objects_made_by, objects_of
from blendrag.store.identity import LEARNED_BEGINNING, is_name
from blendrag.store.payload_files import Name

logger = logging.getLogger("blendrag.store")

#: How long a put waits for other writers.
LOCK_WAIT_S = 10.0
#: How long SQLite waits for a database that other programs hold.
BUSY_WAIT_S = 1.0
#: How long a query waits for the index before it finds chunks by listing directories.
QUERY_WAIT_S = 0.05
#: How long a writer waits at its end to make its rows durable; otherwise the index is rebuilt.
_SYNC_WAIT_S = 1.0
#: Rows read at once by :meth:`Index.oldest`, so that no read transaction lasts.
_PAGE_ROWS = 100

DATABASE = "index.db"
#: SQLite writes it before the database is in WAL mode. One that a crash left would block the database.
_JOURNAL = f"{DATABASE}-journal"
DATABASE_FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", _JOURNAL)

_SCHEMA = """
CREATE TABLE payload (
    used INTEGER PRIMARY KEY, namespace TEXT, key TEXT, nonce TEXT, size_bytes INTEGER,
    UNIQUE (namespace, key)
);
CREATE TABLE totals (entries INTEGER, size_bytes INTEGER);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER payload_added AFTER INSERT ON payload BEGIN
    UPDATE totals SET entries = entries + 1, size_bytes = size_bytes + NEW.size_bytes;
END;
CREATE TRIGGER payload_removed AFTER DELETE ON payload BEGIN
    UPDATE totals SET entries = entries - 1, size_bytes = size_bytes - OLD.size_bytes;
END;
"""
#: ``user_version`` of a database that knows all files; 0 until its first rebuild is committed.
_COMPLETE = 1
_COLUMNS = "namespace, key, nonce, size_bytes"
_ENTRY = "namespace = ? AND key = ?"
_NONCE = re.compile(r"[0-9a-f]{16}", re.ASCII)
_MAX_SIZE_BYTES = 1 << 50

#: SQLite errors that say nothing about the content of the file: it is in use, or the disk fails.
_IN_USE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_NOT_THE_CONTENT = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)


class IndexLocked(StoreError):
    """The index is in use, or its disk does not allow access, for longer than we wait."""


class IndexCorrupt(StoreError):
    """The index is missing or is not what the store wrote. Rebuild it from the files."""


class Index:
    """The rows of one store. Thread-safe.

    Methods raise :class:`IndexLocked`, :class:`IndexCorrupt` or :class:`StoreFullError`.
    """

    def __init__(self, directory: Path, read_only: bool = False) -> None:
        """``read_only``: for maintenance that changes nothing and takes no lock."""
        self._read_only = read_only
        self._directory = directory
        self._threads = threading.RLock()
        self._processes = filelock.FileLock(directory / "lock", mode=0o600)
        self._reader: sqlite3.Connection | None = None
        self._reader_lock = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._file = (0, 0)
        """Device and inode of the open database."""
        self._schema_version = 0
        self._transaction_thread = self._rebuilding_thread = 0

    # -- rows ------------------------------------------------------------------------------------

    def get(self, namespace: str, key: str) -> Name | None:
        """The payload of a key. Takes no lock."""
        query = f"SELECT {_COLUMNS} FROM payload WHERE {_ENTRY}"
        found = self._select(query, namespace, key)
        if not found:
            return None
        name, _ = _row(*found[0])
        if name.entry != (namespace, key):
            raise IndexCorrupt("a row belongs to another key")
        return name

    def knows(self, name: Name) -> bool:
        """Whether the row of that key points to exactly this file."""
        return self.get(*name.entry) == name

    def oldest(self) -> Iterator[tuple[Name, int]]:
        """All payloads and their bytes, least recently used first.

        Without those added or used since the first one.
        """
        ((last,),) = self._select("SELECT MAX(used) FROM payload")
        query = f"SELECT used, {_COLUMNS} FROM payload WHERE used > ? AND used <= ? ORDER BY used LIMIT ?"
        used = -(1 << 63)
        while last is not None and (page := self._select(query, used, last, _PAGE_ROWS)):
            for _, *values in page:
                yield _row(*values)
            used = page[-1][0]

    def learned_bytes(self) -> dict[str, int]:
        """Bytes of each namespace of KV that was learned from prompts."""
        query = (
            "SELECT namespace, SUM(size_bytes) FROM payload WHERE namespace >= ? AND namespace < ? "
            "GROUP BY namespace"
        )
        found = self._select(
            query, LEARNED_BEGINNING, f"{LEARNED_BEGINNING}g"
        )  # g follows all digits
        if not all(is_name(name) and type(total) is int for name, total in found):
            raise IndexCorrupt("a row is not of the form that the store writes")
        return dict(found)

    def oldest_in(self, namespace: str) -> list[tuple[Name, int]]:
        """The payloads of one namespace and their bytes, least recently used first."""
        query = f"SELECT {_COLUMNS} FROM payload WHERE namespace = ? ORDER BY used"
        return [_row(*values) for values in self._select(query, namespace)]

    def recent_keys(self, most: int) -> list[str]:
        """Keys of at most that many payloads, most recently used first."""
        found = self._select("SELECT key FROM payload ORDER BY used DESC LIMIT ?", most)
        return [key for (key,) in found if is_name(key)]

    def totals(self) -> tuple[int, int]:
        """Entries and bytes."""
        found = self._select("SELECT entries, size_bytes FROM totals")
        if len(found) != 1 or not all(type(total) is int and total >= 0 for total in found[0]):
            raise IndexCorrupt("it does not count its rows")
        entries, size_bytes = found[0]
        return entries, size_bytes

    def add(self, name: Name, size_bytes: int) -> None:
        """Insert as the most recently used."""
        with self.transaction() as database:
            database.execute(f"DELETE FROM payload WHERE {_ENTRY}", name.entry)
            database.execute(
                f"INSERT INTO payload (used, {_COLUMNS}) "
                "SELECT COALESCE(MAX(used), 0) + 1, ?, ?, ?, ? FROM payload",
                (*name, size_bytes),
            )

    def drop(self, names: Iterable[Name]) -> None:
        """Delete the rows that point to exactly these files."""
        with self.transaction() as database:
            database.executemany(f"DELETE FROM payload WHERE {_ENTRY} AND nonce = ?", names)

    def touch(self, used: Iterable[tuple[str, str]]) -> None:
        """Mark ``(namespace, key)`` as used most recently, in this order."""
        with self.transaction() as database:
            database.executemany(
                f"UPDATE payload SET used = (SELECT MAX(used) FROM payload) + 1 WHERE {_ENTRY}",
                used,
            )

    def _select(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._sqlite_errors():
            if self._transaction_thread == threading.get_ident():
                assert self._writer is not None
                return self._writer.execute(query, values).fetchall()
            self._follow_replacement()
            with self._reader_lock:
                if self._reader is None:
                    raise IndexLocked(f"index {self._directory} is being replaced; try again")
                return self._reader.execute(query, values).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Several writes as one. Reentrant."""
        with self.exclusive(), self._sqlite_errors():
            is_inner = self._transaction_thread == threading.get_ident()
            if not is_inner:
                self._follow_replacement()
            database = self._writer
            if database is None:
                raise IndexCorrupt("it is not open")
            if is_inner:
                yield database
                return
            self._transaction_thread = threading.get_ident()
            try:
                with database:  # commits, or rolls back
                    database.execute("BEGIN IMMEDIATE")
                    if _schema_version(database) != self._schema_version:  # a trigger would run
                        raise IndexCorrupt("its schema was changed")
                    yield database
            finally:
                self._transaction_thread = 0

    # -- locking ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def exclusive(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the index against all other writers, in this process and others. Reentrant."""
        wait_s = LOCK_WAIT_S if timeout_s is None else timeout_s
        if not self._threads.acquire(timeout=wait_s):
            raise self._locked(f"is held by another thread for {wait_s} s")
        with contextlib.ExitStack() as held:
            held.callback(self._threads.release)
            try:
                held.enter_context(self._processes.acquire(wait_s, poll_interval=0.005))
            except filelock.Timeout as exc:
                raise self._locked(f"is held by another process for {wait_s} s") from exc
            except OSError as exc:
                raise self._locked(f"cannot be used now ({exc.strerror or exc})") from exc
            yield

    # -- the database ----------------------------------------------------------------------------

    def open(self) -> None:
        """Connect. Raises :class:`IndexCorrupt` unless the database is ours and knows all files.

        Caller holds :meth:`exclusive`, except for a read-only index.
        """
        self._connect()
        if self._select("PRAGMA user_version") != [(_COMPLETE,)]:
            self.close()
            raise IndexCorrupt("its rebuild was not finished")

    def rebuild(self, reconcile: Callable[[], None]) -> None:
        """Run ``reconcile`` on the database, or on an empty one if it is missing or corrupt.

        Its changes become visible at once, at the end. Caller holds :meth:`exclusive`.
        """
        self._rebuilding_thread = threading.get_ident()
        try:
            try:
                if self._exists(DATABASE):
                    self._connect()
                else:
                    self._create()
                self._fill(reconcile)
            except IndexCorrupt as exc:
                logger.warning("the store's index is damaged (%s): rebuilt from the files", exc)
                self._create()
                self._fill(reconcile)
        except BaseException:
            self.close()
            raise
        finally:
            self._rebuilding_thread = 0

    def _fill(self, reconcile: Callable[[], None]) -> None:
        with self.transaction() as database:
            reconcile()
            database.execute(f"PRAGMA user_version = {_COMPLETE}")

    def set_aside(self) -> None:
        """Move the database to the quarantine. Caller holds :meth:`exclusive`."""
        self.close()
        quarantine = self._directory.parent / "quarantine"
        for name in DATABASE_FILES:
            try:
                os.replace(self._directory / name, quarantine / name)
            except FileNotFoundError:
                pass
            except OSError:  # a directory, here or there
                os.replace(self._directory / name, quarantine / f"{name}.{secrets.token_hex(8)}")

    def sync(self) -> bool:
        """Make all rows durable, which SQLite does only at a checkpoint; whether they are.

        Never raises. SQLite does it, because closing a descriptor of our own on its files would drop
        this process's locks on them (https://sqlite.org/howtocorrupt.html, §2.2).
        """
        try:
            with self.exclusive(_SYNC_WAIT_S), self._sqlite_errors():
                self._follow_replacement()
                if self._writer is None:
                    return False
                query = "PRAGMA wal_checkpoint(FULL)"
                ((busy, pages, written),) = self._writer.execute(query).fetchall()
                return not busy and pages == written
        except StoreError as exc:
            logger.info("the index is rebuilt at the next opening: %s", exc)
            return False

    def close(self) -> None:
        """Release the database. Idempotent."""
        with self._reader_lock:
            reader, self._reader = self._reader, None
        writer, self._writer = self._writer, None
        for connection in (reader, writer):
            if connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()

    def _create(self) -> None:
        self.set_aside()
        keep_private(self._directory / DATABASE)
        with self._sqlite_errors(), contextlib.closing(self._connected("rwc")) as database:
            database.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        self._connect()

    def _connect(self) -> None:
        """Open the database. Raises :class:`IndexCorrupt` if it is not exactly what we make."""
        self.close()
        if not self._exists(DATABASE):
            raise IndexCorrupt("there is none")
        if self._exists(_JOURNAL):
            raise IndexCorrupt(f"{_JOURNAL} is left over")
        for name in filter(self._exists, DATABASE_FILES):
            if not stat.S_ISREG(os.lstat(self._directory / name).st_mode):
                raise IndexCorrupt(f"{name} is not a regular file")
        if not self._read_only:
            keep_private(self._directory / DATABASE)
        with self._sqlite_errors():
            reader = self._connected("ro")
            try:
                if odd := objects_of(reader) ^ objects_made_by(_SCHEMA):
                    names = ", ".join(sorted({name for _, name, _ in odd}))
                    raise IndexCorrupt(f"unexpected or missing schema: {names}")
                self._schema_version = _schema_version(reader)
                if not self._read_only:
                    self._writer = self._connected("rw")
                    self._writer.execute("PRAGMA journal_mode = WAL").fetchall()
                self._file = self._identity()
            except BaseException:
                reader.close()
                self.close()
                raise
            self._reader = reader

    def _connected(self, mode: str) -> sqlite3.Connection:
        database = sqlite3.connect(
            database_uri(self._directory / DATABASE, mode),
            uri=True,
            timeout=BUSY_WAIT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            database.execute("PRAGMA trusted_schema = OFF")
            database.execute("PRAGMA mmap_size = 0")  # a truncated file would be a SIGBUS
            database.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            database.close()
            raise
        return database

    def _follow_replacement(self) -> None:
        """Reopen a database that another process has replaced."""
        if self._rebuilding_thread not in (0, threading.get_ident()):
            raise IndexLocked("the index is being rebuilt; try again in a moment")
        if self._reader is None:
            raise IndexCorrupt("it is not open")
        if self._read_only:
            return
        file = self._identity()
        if file == self._file:
            return
        with self.exclusive(QUERY_WAIT_S):  # a writer holds it already
            if self._file != self._identity():
                self.open()

    def _identity(self) -> tuple[int, int]:
        try:
            status = os.stat(self._directory / DATABASE)
        except OSError as exc:
            raise IndexCorrupt("it is gone") from exc
        return status.st_dev, status.st_ino

    def _exists(self, name: str) -> bool:
        """Whether there is a file of that name. Raises :class:`IndexLocked` if that is unknown."""
        try:
            os.lstat(self._directory / name)
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise self._locked(f"cannot be used now ({exc.strerror or exc})") from exc
        return True

    # -- errors ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _sqlite_errors(self) -> Iterator[None]:
        """Raise our error for any error of SQLite."""
        try:
            yield
        except UnicodeDecodeError as exc:  # SQLite's message quotes a damaged name
            raise IndexCorrupt(f"unreadable text: {exc}") from exc
        except sqlite3.Error as exc:
            raise self._error(exc) from exc

    def _error(self, error: sqlite3.Error) -> StoreError:
        code = sqlite_code(error)
        if is_out_of_space(error):
            return StoreFullError(f"no space left for index {self._directory}; free some", 1 << 20)
        if code in _IN_USE:
            return self._locked(f"is held by another process for {BUSY_WAIT_S} s")
        paths = (self._directory, self._directory / DATABASE)
        is_writable = all(os.access(path, os.W_OK) for path in paths)
        if code in _NOT_THE_CONTENT and not (code == sqlite3.SQLITE_READONLY and is_writable):
            return self._locked(f"cannot be used now ({error})")
        return IndexCorrupt(str(error))

    def _locked(self, problem: str) -> IndexLocked:
        return IndexLocked(
            f"index {self._directory} {problem}, expected a working disk and no other user for longer "
            "than seconds; check both, then try again"
        )


def _row(namespace: Any, key: Any, nonce: Any, size_bytes: Any) -> tuple[Name, int]:
    """A row as the store writes it, or :class:`IndexCorrupt`."""
    is_name_of_file = is_name(namespace) and is_name(key) and isinstance(nonce, str)
    is_size = type(size_bytes) is int and 0 <= size_bytes < _MAX_SIZE_BYTES
    if is_name_of_file and _NONCE.fullmatch(nonce) and is_size:
        return Name(namespace, key, nonce), size_bytes
    raise IndexCorrupt("a row is not of the form that the store writes")


def _schema_version(database: sqlite3.Connection) -> int:
    """Changes with every change of a table, an index or a trigger."""
    ((version,),) = database.execute("PRAGMA schema_version").fetchall()
    return int(version)
