"""What SQLite's error codes mean, for everything here that keeps a SQLite file. Words no message."""

from __future__ import annotations

import sqlite3

#: What stands in the way without saying anything about what is in the file.
_FOREIGN = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
)


def primary_code(error: sqlite3.Error) -> int | None:
    """The error's primary result code; ``None`` where Python raised it and not SQLite."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def is_foreign(error: sqlite3.Error) -> bool:
    """Whether the file may be sound: it is in use, or its disk or permissions are in the way."""
    return primary_code(error) in _FOREIGN
