"""Is an index database exactly what diskcache 5.6.3 with our settings makes, and nothing else.

Opened read-only, with schema-defined SQL distrusted, before diskcache gets to see it: diskcache
executes triggers, and turns rows of its settings table into PRAGMA statements and attributes.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path
from typing import Any
from urllib.parse import quote

from diskcache.core import DEFAULT_SETTINGS, METADATA

from blendrag.store.sqlite_errors import is_foreign

DATABASE = "cache.db"
DATABASE_FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")
#: What SQLite writes before the database is in WAL mode. Left over by whoever was cut short then, it
#: would keep the database from being read, and from being mended, for good.
JOURNAL = f"{DATABASE}-journal"

#: Our settings: no eviction by diskcache, no statistics, and no mmap (SIGBUS on truncation).
SETTINGS: dict[str, Any] = {
    **DEFAULT_SETTINGS,
    "eviction_policy": "none",
    "cull_limit": 0,
    "sqlite_mmap_size": 0,
}

_TABLE_CACHE = (
    "CREATE TABLE Cache ( rowid INTEGER PRIMARY KEY, key BLOB, raw INTEGER, store_time REAL, "
    "expire_time REAL, access_time REAL, access_count INTEGER DEFAULT 0, tag BLOB, "
    "size INTEGER DEFAULT 0, mode INTEGER DEFAULT 0, filename TEXT, value BLOB)"
)
_UPDATE = "FOR EACH ROW BEGIN UPDATE Settings SET value = value"
_SCHEMA = {
    ("table", "Settings", "CREATE TABLE Settings ( key TEXT NOT NULL UNIQUE, value)"),
    ("table", "Cache", _TABLE_CACHE),
    ("index", "sqlite_autoindex_Settings_1", ""),
    ("index", "Cache_key_raw", "CREATE UNIQUE INDEX Cache_key_raw ON Cache(key, raw)"),
    ("index", "Cache_expire_time", "CREATE INDEX Cache_expire_time ON Cache (expire_time)"),
    *(
        (
            "trigger",
            f"Settings_{name}",
            f"CREATE TRIGGER Settings_{name} AFTER {event} ON Cache {_UPDATE} {change} "
            f'WHERE key = "{name.split("_")[0]}"; END',
        )
        for name, event, change in (
            ("count_insert", "INSERT", "+ 1"),
            ("count_delete", "DELETE", "- 1"),
            ("size_insert", "INSERT", "+ NEW.size"),
            ("size_update", "UPDATE", "+ NEW.size - OLD.size"),
            ("size_delete", "DELETE", "- OLD.size"),
        )
    ),
}


def connect_for_reading(directory: Path, busy_timeout_s: float) -> sqlite3.Connection:
    """A connection that changes nothing.

    SQLite shares a WAL with others even to read, and makes one where there is none. Where it could
    not, on a disk that cannot be written, there is nobody to share it with.
    """
    database = directory / DATABASE
    has_wal = os.path.lexists(directory / DATABASE_FILES[1])
    still = "" if has_wal or os.access(directory, os.W_OK) else "&immutable=1"
    uri = f"file:{quote(str(database.absolute()))}?mode=ro{still}"
    return sqlite3.connect(uri, uri=True, timeout=busy_timeout_s, isolation_level=None)


def fault(directory: Path, busy_timeout_s: float) -> str | None:
    """What is odd about the database in ``directory``; ``None`` if it can be opened.

    Raises ``sqlite3.DatabaseError`` when it cannot be looked at now: in use, or the disk fails.
    """
    if os.path.lexists(directory / JOURNAL):
        return f"{JOURNAL} is left over"
    for name in DATABASE_FILES:
        path = directory / name
        if path.is_symlink() or (path.exists() and not stat.S_ISREG(path.lstat().st_mode)):
            return f"{name} is not a regular file"
    connection = connect_for_reading(directory, busy_timeout_s)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA query_only = ON")
        return _schema_fault(connection) or _settings_fault(connection)
    except sqlite3.DatabaseError as exc:
        if is_foreign(exc):
            raise
        return str(exc)
    except UnicodeDecodeError as exc:  # SQLite's message quotes a damaged name
        return f"unreadable text: {exc}"
    finally:
        connection.close()


def _schema_fault(connection: sqlite3.Connection) -> str | None:
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    schema = {(kind, name, " ".join(str(sql or "").split())) for kind, name, sql in rows}
    strange = {name for _, name, _ in schema - _SCHEMA} or {name for _, name, _ in _SCHEMA - schema}
    return f"unexpected or missing schema: {_listed(strange)}" if strange else None


def _settings_fault(connection: sqlite3.Connection) -> str | None:
    rows = dict(connection.execute("SELECT key, value FROM Settings").fetchall())
    for name in METADATA:
        value = rows.pop(name, None)
        if type(value) is not int or value < 0:
            return f"setting {name} is {value!r}"
    strange = {name for name, _ in rows.items() ^ SETTINGS.items()}
    return f"unexpected settings: {_listed(strange)}" if strange else None


def _listed(names: set[Any]) -> str:
    """In order, whatever types a hostile database gives its names."""
    return ", ".join(sorted(map(str, names)))
