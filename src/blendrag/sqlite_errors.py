"""What SQLite's error codes mean, for everything here that keeps a SQLite file. Words no message."""

from __future__ import annotations

import sqlite3

#: What SQLite says when a write fails for want of space under a quota or a size limit.
_FAILED_WRITES = (
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_TRUNCATE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
)


def primary_code(error: sqlite3.Error) -> int | None:
    """The error's primary result code; ``None`` where Python raised it and not SQLite."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def is_out_of_space(error: sqlite3.Error) -> bool:
    """Whether something could not be written for want of space."""
    code = getattr(error, "sqlite_errorcode", None)
    return primary_code(error) == sqlite3.SQLITE_FULL or code in _FAILED_WRITES
