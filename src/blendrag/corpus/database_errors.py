"""SQLite's errors about a corpus, in a sentence each."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from blendrag.errors import CorpusError, StoreFullError, is_out_of_space
from blendrag.store.sqlite_errors import primary_code

#: Largest text, vector or row; SQLite reads and writes nothing larger.
MAX_ROW_BYTES = 128 * 1024**2
#: How long one process waits for another's transaction.
BUSY_TIMEOUT_S = 30.0


def mapped(error: sqlite3.Error | UnicodeDecodeError, path: Path) -> CorpusError | StoreFullError:
    """SQLite's error in our words; its message may quote a damaged name that is no text."""
    if isinstance(error, UnicodeDecodeError):
        return damaged("a name in it is no text", path)
    primary = primary_code(error)
    if is_out_of_space(error):
        return StoreFullError(
            f"no space left to write {path}; free some, what was stored before is intact"
        )
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return CorpusError(
            f"{path} is locked by another process for over {BUSY_TIMEOUT_S:.0f} s; "
            "wait for it to finish, then try again"
        )
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return CorpusError(
            f"{path} or its directory cannot be written, expected write permission; "
            "change its permissions or choose another --store"
        )
    if primary == sqlite3.SQLITE_CANTOPEN:
        return CorpusError(
            f"{path} cannot be opened, expected a file and a directory that this user may read and "
            "write; change their permissions or choose another --store"
        )
    if primary == sqlite3.SQLITE_IOERR:
        return CorpusError(
            f"{path} cannot be read or written ({error}), expected a working disk; check it, then "
            "try again"
        )
    if primary == sqlite3.SQLITE_NOTADB:
        return CorpusError(
            f"{path} is not a corpus database; give --store another directory or delete the file"
        )
    if primary == sqlite3.SQLITE_TOOBIG or isinstance(error, sqlite3.DataError):
        return CorpusError(
            f"{path} would hold, or holds, a row of over {MAX_ROW_BYTES // 1024**2} MiB, expected less; "
            "cut the text or its metadata into smaller ones"
        )
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH):
        return damaged(str(error), path)
    return CorpusError(f"{path} cannot be used ({error}); check the path and its permissions")


def damaged_settings(what: str, path: Path) -> CorpusError:
    """No repair mends a setting."""
    return CorpusError(
        f"the settings of the corpus {path} are damaged ({what}); delete the directory {path.parent} and "
        "ingest again, which finds the stored KV"
    )


def damaged(what: str, path: Path) -> CorpusError:
    """A corpus cannot be used because of ``what``."""
    return CorpusError(
        f"{path} is damaged ({what}); try blendrag store check --repair, else delete the directory "
        f"{path.parent}, then ingest again, which finds the stored KV"
    )
