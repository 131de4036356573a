"""The corpus's SQLite file: its schema, who may open it, and what its errors mean.

Owns connection and schema. Does not know what is written there. The file is the truth of a corpus:
texts, metadata, anchors and vectors; everything else (the FAISS file) can be made from it.

Invariants of the tables:

- ``chunk`` holds a text once, whichever documents contain it; ``passage`` says where it stands. A
  chunk without passage does not outlive the transaction that removed the last one.
- A vector belongs to a passage, not to a chunk: the title of the document is embedded with it. A
  passage's id is never given twice (AUTOINCREMENT) and its vector never changes, so an index that
  knows the same ids is the same index.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from blendrag.errors import CorpusError
from blendrag.retriever import anchor_rows
from blendrag.retriever.database_errors import BUSY_TIMEOUT_S, mapped

APPLICATION_ID = 0x424C5247  # "BLRG"
#: 2: entries, texts whose KV is to be dropped, and anchors in a table of their own, which a file of
#: version 1 gains when it is opened to be written.
SCHEMA_VERSION = 2
FILE_NAME = "corpus.sqlite"
#: How the source of a document that came by an id begins.
ENTRY = "entry:"

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE document (
    id INTEGER PRIMARY KEY,
    source TEXT NOT NULL UNIQUE,
    title TEXT NOT NULL,
    digest TEXT NOT NULL,
    metadata TEXT NOT NULL
);
CREATE TABLE chunk (
    id INTEGER PRIMARY KEY,
    chunk_id TEXT NOT NULL UNIQUE,
    text TEXT NOT NULL,
    tokens INTEGER NOT NULL,
    anchor_hash INTEGER NOT NULL,
    length INTEGER NOT NULL,
    digest INTEGER NOT NULL
);
CREATE TABLE passage (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    document INTEGER NOT NULL REFERENCES document(id) ON DELETE CASCADE,
    chunk INTEGER NOT NULL REFERENCES chunk(id),
    start INTEGER NOT NULL,
    end INTEGER NOT NULL,
    vector BLOB NOT NULL
);
CREATE INDEX passage_by_document ON passage(document);
CREATE INDEX passage_by_chunk ON passage(chunk);
INSERT INTO meta VALUES ('generation', '0');
"""

_SCHEMA_2 = """
CREATE TABLE entry (
    id TEXT PRIMARY KEY,
    document INTEGER NOT NULL UNIQUE REFERENCES document(id) ON DELETE CASCADE,
    parent TEXT NOT NULL,
    given TEXT
) WITHOUT ROWID;
CREATE INDEX entry_by_parent ON entry(parent);
CREATE TABLE anchor (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    chunk INTEGER NOT NULL UNIQUE REFERENCES chunk(id) ON DELETE CASCADE,
    chunk_id TEXT NOT NULL,
    packed BLOB NOT NULL
);
ALTER TABLE chunk DROP COLUMN anchor_hash;
ALTER TABLE chunk DROP COLUMN length;
ALTER TABLE chunk DROP COLUMN digest;
CREATE INDEX passage_unsearchable ON passage(id) WHERE length(vector) = 0;
CREATE TABLE dropped (
    chunk_id TEXT PRIMARY KEY,
    text TEXT NOT NULL,
    since REAL NOT NULL
) WITHOUT ROWID;
"""


def can_write(directory: Path) -> bool:
    """Whether this user may change the corpus in ``directory``, which SQLite writes beside, too."""
    path = directory / FILE_NAME
    return os.access(directory, os.W_OK | os.X_OK) and (
        not path.exists() or os.access(path, os.W_OK)
    )


def open_database(directory: Path, read_only: bool = False) -> sqlite3.Connection:
    """Connects to the corpus in ``directory``, creating its tables in a new file.

    Usable from any thread, one at a time (the caller holds a lock). With ``read_only``, the file
    is there already and is not changed. Raises :class:`CorpusError` where the file is not a corpus
    or was written by a newer version.
    """
    path = directory / FILE_NAME
    try:
        connection = sqlite3.connect(
            _read_only_uri(directory) if read_only else path,
            uri=read_only,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            if not read_only:
                _prepare(connection, path)
            elif not _identified(connection, path):
                raise CorpusError(f"{path} is empty, expected a corpus to read; ingest first")
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as exc:
        raise mapped(exc, path) from exc
    return connection


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


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA foreign_keys = ON")
    if not _identified(connection, path):
        connection.execute("PRAGMA journal_mode = WAL")
    if _version(connection) < SCHEMA_VERSION:
        _upgrade(connection, path)
    # A lost last transaction means ingesting one document again; a torn file cannot happen.
    connection.execute("PRAGMA synchronous = NORMAL")
    if connection.execute("SELECT 1 FROM meta WHERE key = 'corpus_id'").fetchone() is None:
        named = ("corpus_id", secrets.token_hex(16))
        connection.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", named)


def _upgrade(connection: sqlite3.Connection, path: Path) -> None:
    """Creates what is missing. Two processes may at once: what is there is seen in the write lock."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        missing = [] if _identified(connection, path) else [_SCHEMA]
        if _version(connection) < SCHEMA_VERSION:
            missing.append(_SCHEMA_2)
        for statement in ";".join(missing).split(";"):
            connection.execute(statement)
        if _SCHEMA_2 in missing:
            anchor_rows.insert(
                connection, connection.execute("SELECT id, chunk_id, text FROM chunk")
            )
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def has_entries(connection: sqlite3.Connection) -> bool:
    """Whether the file knows entries; one of version 1 that is only read does not."""
    return _version(connection) >= 2


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _identified(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file is a corpus we can read (True) or still empty (False)."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    version = _version(connection)
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application == 0 and version == 0 and tables == 0:
        return False
    if application != APPLICATION_ID:
        raise CorpusError(
            f"{path} is some other program's database, expected a blendrag corpus; "
            "give --store another directory"
        )
    if version > SCHEMA_VERSION:
        raise CorpusError(
            f"{path} has format {version}, expected at most {SCHEMA_VERSION}; "
            "it was written by a newer blendrag: upgrade, or ingest into another --store"
        )
    return True


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
    except sqlite3.Error as exc:
        raise mapped(exc, path) from exc
