"""The corpus's SQLite file: its schema, who may open it, and what its errors mean.

Owns connection and schema. Does not know what is written there. The file is the truth of a corpus:
texts, metadata, anchors and vectors; everything else (the FAISS file) can be made from it.

Invariants of the tables:

- ``chunk`` holds a text once, whichever documents contain it; ``passage`` says where it stands. A
  chunk without passage does not outlive the transaction that removed the last one.
- A vector belongs to a passage, not to a chunk: the title of the document is embedded with it. A
  passage's id is never given twice (AUTOINCREMENT) and its vector never changes, so an index that
  knows the same ids is the same index.
- Every row carries a digest over its other columns (:mod:`blendrag.corpus.rows`); ``passages`` of a
  document counts them, so that a lost one is noticed.
- ``generation`` grows with every transaction that changes passages.
- ``corpus_id`` is random and never changes: a file made anew at the same place is another corpus.
- ``anchor`` has a row for each chunk: what the chunk is recognised by in a prompt.
- ``entry`` names those documents that came by an id and are one chunk each; their source is
  :data:`ENTRY` before the id. A passage's vector is empty where nothing is to be found by search.
- ``dropped`` remembers texts whose KV may be stored though no document holds them: since a removal
  (``since`` 0), or since an addition began that has not ended yet (``since``: when, in Unix time).
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

from blendrag.corpus.database_errors import BUSY_TIMEOUT_S, MAX_ROW_BYTES, mapped
from blendrag.corpus.rows import META
from blendrag.errors import CorpusError
from blendrag.store.regular_files import open_regular

APPLICATION_ID = 0x424C5247  # "BLRG"
#: 3: every row has a digest. Files of earlier formats are refused.
SCHEMA_VERSION = 3
FILE_NAME = "corpus.sqlite"
#: How the source of a document that came by an id begins.
ENTRY = "entry:"
#: The end of a rollback journal that names a super-journal, a file that SQLite would delete. We never
#: write one (https://www.sqlite.org/fileformat.html#the_rollback_journal).
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")

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


class EmptyDatabase(CorpusError):
    """The file is there and has no tables: just being made, or emptied."""


def can_write(directory: Path) -> bool:
    """Whether this user may change the corpus in ``directory``, which SQLite writes beside, too."""
    path = directory / FILE_NAME
    return os.access(directory, os.W_OK | os.X_OK) and (
        not path.exists() or os.access(path, os.W_OK)
    )


def open_database(
    directory: Path, read_only: bool = False, create: bool = False
) -> sqlite3.Connection:
    """Connects to the corpus in ``directory``; with ``create``, makes its tables in a new file.

    Usable from any thread, one at a time (the caller holds a lock). With ``read_only``, the file
    is there already and is not changed. Raises :class:`CorpusError` where the file is not a corpus, has
    anything else in it than our tables, or was written by another version.
    """
    path = directory / FILE_NAME
    try:
        _check_files(directory)
        connection = sqlite3.connect(
            _read_only_uri(directory) if read_only else path,
            uri=read_only,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            _distrust(connection)
            _prepare(connection, path, read_only, create)
        except BaseException:
            connection.close()
            raise
    except OSError as exc:
        raise CorpusError(
            f"{path} cannot be opened ({exc.strerror}); check its permissions or choose another --store"
        ) from exc
    except (sqlite3.Error, UnicodeDecodeError) as exc:
        raise mapped(exc, path) from exc
    return connection


def _check_files(directory: Path) -> None:
    """Before SQLite opens them, which follows links and waits for a FIFO. Raises :class:`OSError`."""
    for path in (directory, *(directory / f"{FILE_NAME}{end}" for end in ("", "-wal", "-shm"))):
        expected = stat.S_ISDIR if path == directory else stat.S_ISREG
        if os.path.lexists(path) and not expected(path.lstat().st_mode):
            kind = "a directory" if path == directory else "a regular file"
            raise CorpusError(
                f"{path} is not {kind}, expected one made by blendrag ingest; move it away or choose "
                "another --store"
            )
    journal = directory / f"{FILE_NAME}-journal"
    if not os.path.lexists(journal):
        return
    with suppress(FileNotFoundError), os.fdopen(open_regular(journal), "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        file.seek(max(0, size_bytes - len(_SUPER_JOURNAL)))
        if file.read(len(_SUPER_JOURNAL)) == _SUPER_JOURNAL:
            raise CorpusError(f"{journal} was not written by blendrag; delete it")


def _distrust(connection: sqlite3.Connection) -> None:
    """A file may be anybody's: no code in its schema, no row larger than ours, text that is no UTF-8."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_ROW_BYTES)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")


def _read_only_uri(directory: Path) -> str:
    path = (directory / FILE_NAME).absolute()
    uri = f"file:{quote(os.fsencode(path))}?mode=ro"
    # A reader of a WAL needs a file to share locks in. Where it cannot make one, nobody is writing
    # either: unless a log was left over, the database is all there is to read.
    log = path.with_name(f"{FILE_NAME}-wal")
    left_over = log.exists() and log.stat().st_size > 0
    if os.access(directory, os.W_OK | os.X_OK) or left_over:
        return uri
    return f"{uri}&immutable=1"


def _prepare(connection: sqlite3.Connection, path: Path, read_only: bool, create: bool) -> None:
    if not _identified(connection, path):
        if read_only or not create:
            raise EmptyDatabase(
                f"{path} is empty, expected a corpus; delete the directory {path.parent} and ingest again"
            )
        connection.execute("PRAGMA journal_mode = WAL")
        _make(connection, path)
    if read_only:
        return
    connection.execute("PRAGMA foreign_keys = ON")
    # A lost last transaction means ingesting one document again; a torn file cannot happen.
    connection.execute("PRAGMA synchronous = NORMAL")


def _make(connection: sqlite3.Connection, path: Path) -> None:
    """Creates the tables. Two processes may at once: what is there is seen in the write lock."""
    with transaction(connection, path):
        if _identified(connection, path):
            return
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        META.put(connection, "generation", "0")
        META.put(connection, "corpus_id", secrets.token_hex(16))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _identified(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file is a corpus we can read (True) or still empty (False)."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    objects = _objects(connection)
    if application == 0 and version == 0 and not objects:
        return False
    if application != APPLICATION_ID:
        raise CorpusError(
            f"{path} is some other program's database, expected a blendrag corpus; "
            "give --store another directory"
        )
    if version > SCHEMA_VERSION:
        raise CorpusError(
            f"{path} has format {version}, expected {SCHEMA_VERSION}; "
            "it was written by a newer blendrag: upgrade, or ingest into another --store"
        )
    if version < SCHEMA_VERSION:
        raise CorpusError(
            f"{path} has format {version}, expected {SCHEMA_VERSION}; it was written by an older "
            f"blendrag without checksums: delete the directory {path.parent} and ingest again"
        )
    if strange := objects ^ _expected_objects():
        names = ", ".join(sorted(f"{kind} {name}"[:60] for kind, name, _ in strange)[:4])
        raise CorpusError(
            f"{path} does not have the tables of a corpus and nothing else ({names}); delete the "
            f"directory {path.parent} and ingest again"
        )
    return True


def _objects(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    """Kind, name and SQL of everything in the schema."""
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    return {(str(kind), str(name), str(sql or "")) for kind, name, sql in rows}


@lru_cache(maxsize=1)
def _expected_objects() -> frozenset[tuple[str, str, str]]:
    """What the schema makes."""
    with closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript(_SCHEMA)
        return frozenset(_objects(empty))


@contextmanager
def transaction(
    connection: sqlite3.Connection, path: Path, reads_only: bool = False
) -> Iterator[sqlite3.Connection]:
    """All or nothing, one writer at a time across processes; maps SQLite's errors.

    With ``reads_only``, nobody waits: what is read is one state of the file, whoever writes meanwhile.
    """
    try:
        connection.execute("BEGIN DEFERRED" if reads_only else "BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    except (sqlite3.Error, UnicodeDecodeError) as exc:
        raise mapped(exc, path) from exc
