"""The SQLite file of a corpus: schema, checksummed rows, connection, transactions and errors.

Several processes may use the file at once, and several threads one connection.

Invariants of the tables:

- ``chunk`` holds a text once, whichever documents contain it; ``passage`` records where. A chunk is removed
  in the transaction that removes its last passage.
- A vector belongs to a passage, not to a chunk, as the document's title is embedded with it. It is empty for
  text that search must not find. A passage's id is never reused (AUTOINCREMENT) and its vector never changes,
  so two indexes over the same ids are equal.
- Every row carries a digest of its other columns; ``document.passages`` counts passages, so that a lost one
  is noticed.
- The setting ``generation`` grows with every transaction that changes passages.
- ``anchor`` has a row per chunk: the hashes that find it in prompts. Its ids ascend, so new rows have higher
  ids than all earlier ones.
- ``entry`` names documents that were added by id, with one chunk each; their source begins with
  :data:`ENTRY_SOURCE`.
- ``full_text`` has a row per passage with a vector (:mod:`blendrag.corpus.full_text`).
- ``dropped`` records texts that no document holds although their KV may be stored: removed ones (``since``
  0), or ones whose addition has begun (``since`` 1) and has not ended.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from blendrag.errors import (
    CorpusError,
    StoreFullError,
    StoreUnavailableError,
    check_unicode,
    is_out_of_space,
    sqlite_code,
)
from blendrag.store import databases
from blendrag.store.regular_files import open_regular
from blendrag.text.terms import TERMS_VERSION

T = TypeVar("T")

logger = logging.getLogger(__name__)

DIRECTORY = "corpus"
FILE_NAME = "corpus.sqlite"
APPLICATION_ID = 0x424C5247  # "BLRG"
SCHEMA_VERSION = 4
#: Largest text, vector or row; SQLite reads and writes nothing larger.
MAX_ROW_BYTES = 128 * 1024**2
#: How long one process waits for another's transaction.
BUSY_TIMEOUT_S = 30.0
#: How the source of a document begins that was added by id.
ENTRY_SOURCE = "entry:"
#: The end of a rollback journal that names a super-journal, a file that SQLite would delete. blendrag never
#: writes one (https://www.sqlite.org/fileformat.html#the_rollback_journal).
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)

_SCHEMA = """
CREATE TABLE meta (
    key TEXT PRIMARY KEY, value TEXT NOT NULL, row_digest BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE document (
    id INTEGER PRIMARY KEY,
    source TEXT NOT NULL UNIQUE,
    title TEXT NOT NULL,
    digest TEXT NOT NULL,
    metadata TEXT NOT NULL,
    passages INTEGER NOT NULL,
    row_digest BLOB NOT NULL
);
CREATE TABLE chunk (
    id INTEGER PRIMARY KEY,
    chunk_id TEXT NOT NULL UNIQUE,
    text TEXT NOT NULL,
    tokens INTEGER NOT NULL,
    row_digest BLOB NOT NULL
);
CREATE TABLE passage (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    document INTEGER NOT NULL REFERENCES document(id) ON DELETE CASCADE,
    chunk INTEGER NOT NULL REFERENCES chunk(id),
    start INTEGER NOT NULL,
    end INTEGER NOT NULL,
    vector BLOB NOT NULL,
    row_digest BLOB NOT NULL
);
CREATE INDEX passage_by_document ON passage(document);
CREATE INDEX passage_by_chunk ON passage(chunk);
CREATE INDEX passage_unsearchable ON passage(id) WHERE length(vector) = 0;
CREATE TABLE entry (
    id TEXT PRIMARY KEY,
    document INTEGER NOT NULL UNIQUE REFERENCES document(id) ON DELETE CASCADE,
    parent TEXT NOT NULL,
    given TEXT,
    row_digest BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX entry_by_parent ON entry(parent);
CREATE TABLE anchor (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    chunk INTEGER NOT NULL UNIQUE REFERENCES chunk(id) ON DELETE CASCADE,
    chunk_id TEXT NOT NULL,
    packed BLOB NOT NULL,
    row_digest BLOB NOT NULL
);
CREATE TABLE dropped (
    chunk_id TEXT PRIMARY KEY,
    text TEXT NOT NULL,
    since REAL NOT NULL,
    row_digest BLOB NOT NULL
) WITHOUT ROWID;
"""
#: The setting of that name has the version of its terms. Its rowids are those of passages. The ``ascii``
#: tokenizer splits terms at spaces and changes none.
FULL_TEXT = "full_text"
FULL_TEXT_SCHEMA = f"CREATE VIRTUAL TABLE {FULL_TEXT} USING fts5(title, text, tokenize='ascii')"


# -- rows -------------------------------------------------------------------------------------------


class Json:
    """Type of a column that holds a JSON object as text, read as a ``dict``."""


class DamagedRow(Exception):
    """A row is not what was written; the message names the row."""


class CheckedTable:
    """Columns of a table by name and type, the first of which is the key.

    Every row ends with a digest of its values, written with it and checked when it is read. The digest
    detects damage, not forgery, so types are checked as well: a forged row raises :class:`DamagedRow` or has
    them.
    """

    def __init__(self, name: str, **columns: Any) -> None:
        self.name = name
        self.columns = columns
        self.key = next(iter(columns))
        self.selected = ", ".join(f"{name}.{column}" for column in (*columns, "row_digest"))
        """All columns and the digest, for a SELECT."""
        self.width = len(columns) + 1

    def checked(self, row: Sequence[Any]) -> tuple[Any, ...]:
        """The values of a row of :attr:`selected`. Raises :class:`DamagedRow`."""
        *values, digest = row
        try:
            if digest == self.digest(values):
                kinds = self.columns.values()
                return tuple(_checked(v, kind) for v, kind in zip(values, kinds, strict=True))
        except (TypeError, ValueError, RecursionError):
            pass
        raise DamagedRow(f"{self.name} {values[0]!r:.80}")

    def digest(self, values: Sequence[Any]) -> bytes:
        """xxh3-128 over the name of the table and the length-prefixed values."""
        parts = [self.name.encode()]
        for value in values:
            data = _encoded(value)
            parts += (b"%d:" % len(data), data)
        return xxhash.xxh3_128_digest(b"".join(parts))

    def put(self, connection: sqlite3.Connection, *values: Any) -> None:
        """Write a row in place of an earlier one with the same key."""
        marks = ", ".join("?" * self.width)
        connection.execute(
            f"INSERT OR REPLACE INTO {self.name} VALUES ({marks})", (*values, self.digest(values))
        )

    def add(self, connection: sqlite3.Connection, *values: Any) -> int:
        """Write a new row and return its key. ``values``: those of the other columns."""
        names = ", ".join([*self.columns][1:])
        marks = ", ".join("?" * len(values))
        (key,) = connection.execute(
            f"INSERT INTO {self.name} ({names}, row_digest) VALUES ({marks}, x'') "
            f"RETURNING {self.key}",
            values,
        ).fetchone()
        self.seal(connection, key, *values)
        return int(key)

    def seal(self, connection: sqlite3.Connection, *values: Any) -> None:
        """Write the digest of a row with these values."""
        connection.execute(
            f"UPDATE {self.name} SET row_digest = ? WHERE {self.key} = ?",
            (self.digest(values), values[0]),
        )


def _encoded(value: Any) -> bytes:
    """A value with its type. Raises :class:`TypeError`."""
    if isinstance(value, str):
        # surrogateescape: text that is not UTF-8 is read in that form, see _connect
        return b"t" + value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return b"b" + value
    if isinstance(value, int):
        return b"i%d" % value
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if value is None:
        return b"n"
    raise TypeError(f"a {type(value).__name__} in a row")


def _checked(value: Any, kind: Any) -> Any:
    if kind is Json:
        value, kind = json.loads(value), dict
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__}, expected {kind}")
    if isinstance(value, str):
        value.encode("utf-8")  # raises UnicodeEncodeError for bytes that were not UTF-8
    return value


META = CheckedTable("meta", key=str, value=str)
DOCUMENT = CheckedTable(
    "document", id=int, source=str, title=str, digest=str, metadata=Json, passages=int
)
CHUNK = CheckedTable("chunk", id=int, chunk_id=str, text=str, tokens=int)
PASSAGE = CheckedTable("passage", id=int, document=int, chunk=int, start=int, end=int, vector=bytes)
ENTRY = CheckedTable("entry", id=str, document=int, parent=str, given=str | None)
HASHES = CheckedTable("anchor", id=int, chunk=int, chunk_id=str, packed=bytes)
DROPPED = CheckedTable("dropped", chunk_id=str, text=str, since=float)
TABLES = (META, DOCUMENT, CHUNK, PASSAGE, ENTRY, HASHES, DROPPED)


def entry_of(document: str) -> tuple[str | None, str]:
    """Id and shown source of the document with this stored source; no id if it is no entry."""
    if document.startswith(ENTRY_SOURCE):
        with suppress(ValueError, TypeError, RecursionError):
            entry_id, source = json.loads(document[len(ENTRY_SOURCE) :])
            return str(entry_id), str(source)
    return None, document


# -- errors -----------------------------------------------------------------------------------------


class EmptyDatabase(CorpusError):
    """The file exists and has no tables: it is being created, or was emptied."""


_LOCKED = (
    f"is locked by another process for over {BUSY_TIMEOUT_S:.0f} s; "
    "wait for it to finish, then try again"
)
_READ_ONLY = (
    "or its directory cannot be written, expected write permission; change its permissions or choose "
    "another store"
)
#: What SQLite's primary result codes mean for a corpus, and the remedy.
_MEANINGS = {
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_PERM: _READ_ONLY,
    sqlite3.SQLITE_CANTOPEN: "cannot be opened, expected a file and a directory that this user may read and "
    "write; change their permissions or choose another store",
    sqlite3.SQLITE_IOERR: "cannot be read or written ({error}), expected a working disk; check it, then try "
    "again",
    sqlite3.SQLITE_NOTADB: "is not a corpus database; choose another store or delete the file",
    sqlite3.SQLITE_TOOBIG: f"has or would get a row of over {MAX_ROW_BYTES // 1024**2} MiB, expected less; "
    "cut the text or its metadata into smaller ones",
}


def mapped(error: sqlite3.Error | UnicodeDecodeError, path: Path) -> CorpusError | StoreFullError:
    """One sentence for an error of SQLite, whose message may quote a damaged name that is not text."""
    if isinstance(error, UnicodeDecodeError):
        return damaged("a name in it is not text", path)
    if is_out_of_space(error):
        return StoreFullError(
            f"no space left to write {path}; free some, what was stored before is intact"
        )
    code = sqlite3.SQLITE_TOOBIG if isinstance(error, sqlite3.DataError) else sqlite_code(error)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH):
        return damaged(str(error), path)
    other = "cannot be used ({error}); check the path and its permissions"
    meaning = _MEANINGS.get(code or 0, other)
    return CorpusError(f"{path} {meaning.format(error=error)}")


@contextmanager
def _mapped_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as exc:
        raise mapped(exc, path) from exc


def damaged(what: str, path: Path) -> CorpusError:
    return CorpusError(
        f"{path} is damaged ({what}); try blendrag store check --repair, else delete the directory "
        f"{path.parent}, then ingest again, which finds the stored KV"
    )


def damaged_settings(what: str, path: Path) -> CorpusError:
    """A damaged setting, which no repair can restore."""
    return CorpusError(
        f"the settings of the corpus {path} are damaged ({what}); delete the directory {path.parent} and "
        "ingest again, which finds the stored KV"
    )


# -- opening ----------------------------------------------------------------------------------------


def can_write(directory: Path) -> bool:
    """Whether this user may change the corpus in ``directory``. SQLite writes other files there, too."""
    path = directory / FILE_NAME
    return os.access(directory, os.W_OK | os.X_OK) and (
        not os.path.exists(path) or os.access(path, os.W_OK)  # which raises no error of the disk
    )


def _connect(directory: Path, read_only: bool, create: bool) -> sqlite3.Connection:
    """Open the database; with ``create``, make the tables of an empty one.

    Raises :class:`CorpusError` if the file is not a corpus of this version with our tables and nothing else.
    """
    path = directory / FILE_NAME
    try:
        _check_files(directory)
        if not read_only:
            databases.keep_private(path)
        connection = sqlite3.connect(
            databases.database_uri(path, "ro" if read_only else "rwc"),
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
    except OSError as exc:
        raise CorpusError(
            f"{path} cannot be opened ({exc.strerror}); check its permissions or choose another store"
        ) from exc
    try:
        # The file may come from anybody: run no code in its schema, read no row larger than ours.
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_ROW_BYTES)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
        if not _is_corpus(connection, path):
            if read_only or not create:
                raise EmptyDatabase(
                    f"{path} is empty, expected a corpus; delete the directory {path.parent} and "
                    "ingest again"
                )
            connection.execute("PRAGMA journal_mode = WAL")
            _create_tables(connection, path)
        if not read_only:
            connection.execute("PRAGMA foreign_keys = ON")
            # Losing the last transaction costs ingesting one document again; the file is never torn.
            connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_files(directory: Path) -> None:
    """Refuse what others can write, and links, FIFOs and devices, which SQLite would follow or wait for.

    May raise :class:`OSError`.
    """
    for path in (directory, *(directory / f"{FILE_NAME}{end}" for end in ("", "-wal", "-shm"))):
        expected = stat.S_ISDIR if path == directory else stat.S_ISREG
        if os.path.lexists(path) and not expected(path.lstat().st_mode):
            kind = "a directory" if path == directory else "a regular file"
            raise CorpusError(
                f"{path} is not {kind}, expected one made by blendrag ingest; move it away or choose "
                "another store"
            )
    try:
        databases.refuse_if_shared(f"store {directory.parent}", directory.parent.stat().st_mode)
        databases.refuse_if_shared(str(directory), directory.stat().st_mode)
    except StoreUnavailableError as exc:
        raise CorpusError(str(exc)) from exc
    journal = directory / f"{FILE_NAME}-journal"
    if not os.path.lexists(journal):
        return
    with suppress(FileNotFoundError), os.fdopen(open_regular(journal), "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        file.seek(max(0, size_bytes - len(_SUPER_JOURNAL)))
        if file.read(len(_SUPER_JOURNAL)) == _SUPER_JOURNAL:
            raise CorpusError(f"{journal} was not written by blendrag; delete it")


def _create_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Two processes may do so at once: the second sees the tables once it has the write lock."""
    with _transaction(connection, path, "IMMEDIATE"):
        if _is_corpus(connection, path):
            return
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        META.put(connection, "generation", "0")
        connection.execute(FULL_TEXT_SCHEMA)
        META.put(connection, FULL_TEXT, str(TERMS_VERSION))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _full_text_objects() -> frozenset[tuple[str, str, str]]:
    """Raises :class:`CorpusError` if this Python's SQLite lacks FTS5."""
    try:
        return databases.objects_made_by(FULL_TEXT_SCHEMA)
    except sqlite3.OperationalError as exc:
        raise CorpusError(
            f"SQLite {sqlite3.sqlite_version} of this Python lacks FTS5, expected one that has it; use "
            "another Python"
        ) from exc


def _is_corpus(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file is a corpus of this version (True) or still empty (False)."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    objects, full_text = databases.objects_of(connection), _full_text_objects()
    if application == 0 and version == 0 and not objects:
        return False
    if application != APPLICATION_ID:
        raise CorpusError(
            f"{path} is a database of another program, expected a blendrag corpus; "
            "choose another store"
        )
    if version != SCHEMA_VERSION:
        newer = "a newer blendrag: upgrade, or ingest into another store"
        older = f"an older blendrag: delete the directory {path.parent} and ingest again"
        raise CorpusError(
            f"{path} has format {version}, expected {SCHEMA_VERSION}; it was written by "
            f"{newer if version > SCHEMA_VERSION else older}"
        )
    # what is lost of the full-text index is built again
    if strange := (objects ^ databases.objects_made_by(_SCHEMA)) - full_text:
        names = ", ".join(sorted(f"{kind} {name}"[:60] for kind, name, _ in strange)[:4])
        raise CorpusError(
            f"{path} has other tables than a corpus ({names}); delete the directory {path.parent} and "
            "ingest again"
        )
    return True


@contextmanager
def _transaction(connection: sqlite3.Connection, path: Path, kind: str) -> Iterator[None]:
    """All or nothing. ``IMMEDIATE``: one writer at a time across processes. ``DEFERRED``: waits for no
    writer, and everything read is one state of the file."""
    with _mapped_errors(path):
        connection.execute(f"BEGIN {kind}")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


class CorpusFile:
    """An open corpus file: one connection under one lock, transactions, and the corpus's settings."""

    def __init__(self, directory: Path, read_only: bool = False, create: bool = False) -> None:
        """Raises :class:`CorpusError`."""
        self.directory = directory
        self.read_only = read_only
        self.path = directory / FILE_NAME
        with _mapped_errors(self.path):
            self.connection = _connect(directory, read_only, create)
        self.lock = threading.RLock()
        self.closed = False
        self._warned: set[str] = set()
        self._known: dict[str, Any] = {}
        """What was read of the file in version :attr:`_version`, by name."""
        self._version = -1
        self._is_written = False
        """Whether a transaction of this connection changes the file."""

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self.lock:
            if not self.closed:
                self.connection.close()
                self.closed = True

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self.lock:
            if self.closed:
                raise CorpusError(f"the corpus at {self.directory} is closed; open it again")
            yield

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        with self._using():
            if self.read_only:
                raise CorpusError(
                    f"the corpus at {self.directory} is read-only, expected one that can be "
                    "written; open it without read_only, change its permissions or choose another store"
                )
            try:
                self._is_written = True
                with _transaction(self.connection, self.path, "IMMEDIATE"):
                    yield self.connection
            finally:
                self._is_written = False
                self._known.clear()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Everything read within this context is one state of the file. May be nested."""
        with self._using(), ExitStack() as transaction:
            if not self.connection.in_transaction:
                transaction.enter_context(_transaction(self.connection, self.path, "DEFERRED"))
            yield self.connection

    def known(self, name: str, read: Callable[[], T]) -> T:
        """What ``read()`` returned, which is called again once the file has changed."""
        with self._using():
            if self._is_written:
                return read()
            if name not in self._known or self._version != self._data_version():
                with self.reading():
                    if (version := self._data_version()) != self._version:
                        self._known.clear()
                        self._version = version
                    if name not in self._known:
                        self._known[name] = read()
            found: T = self._known[name]
            return found

    def _data_version(self) -> int:
        """A number that changes when another connection changes the file."""
        ((version,),) = self.rows("PRAGMA data_version")
        return int(version)

    def rows(self, query: str, *parameters: str | float) -> list[tuple]:
        for value in parameters:
            if isinstance(value, str):
                check_unicode(value, "an id, source or title")
        with self._using(), _mapped_errors(self.path):
            return self.connection.execute(query, parameters).fetchall()

    def sound_rows(
        self, tables: Sequence[CheckedTable], condition: str, *parameters: str | float
    ) -> Iterator[tuple[tuple[Any, ...], ...]]:
        """Rows of the first table with their rows of the others: the values of each.

        ``condition`` is the rest of the query, with its joins. Damaged rows are left out with a warning.
        """
        columns = ", ".join(table.selected for table in tables)
        for row in self.rows(f"SELECT {columns} FROM {tables[0].name} {condition}", *parameters):
            left = iter(row)
            try:
                yield tuple(table.checked([*islice(left, table.width)]) for table in tables)
            except DamagedRow as exc:
                self.warn_damaged(str(exc))

    def warn_damaged(self, what: str) -> None:
        """Log once that a row is left out."""
        self.warn_once(
            f"the corpus at {self.directory} is damaged: row {what} is not what was written and is left out; "
            "run blendrag store check --repair, then ingest again"
        )

    def warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)

    def has_full_text(self) -> bool:
        """Whether all tables of the full-text index are there."""
        with self._using(), _mapped_errors(self.path):
            return _full_text_objects() <= databases.objects_of(self.connection)

    def generation(self) -> int:
        return self.number("generation") or 0

    def number(self, key: str) -> int | None:
        """A setting that is a number. Raises :class:`CorpusError` if it is not."""
        value = self.meta(key)
        if value is None:
            return None
        if not _NUMBER.fullmatch(value):
            raise damaged_settings(f"setting {key} is {value!r:.40}", self.path)
        return int(value)

    def meta(self, key: str) -> str | None:
        """A setting. Raises :class:`CorpusError` if any setting is damaged, as it might be this one."""
        return self.known("settings", self._settings).get(key)

    def _settings(self) -> dict[str, str]:
        rows = self.rows(f"SELECT {META.selected} FROM meta LIMIT 100")
        try:
            return dict(META.checked(row) for row in rows)
        except DamagedRow as exc:
            raise damaged_settings(f"row {exc}", self.path) from exc

    def set_meta(self, key: str, value: str) -> None:
        """Write a setting, inside a transaction."""
        META.put(self.connection, key, value)
