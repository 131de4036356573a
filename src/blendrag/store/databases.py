"""SQLite files, which may come from anybody: who may use them, how they are opened, what is in them."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from functools import cache
from pathlib import Path
from urllib.parse import quote

from blendrag.errors import StoreUnavailableError


def refuse_if_shared(what: str, mode: int) -> None:
    """Refuse a directory in which other users could plant files."""
    if mode & stat.S_IWOTH:
        raise StoreUnavailableError(
            f"{what} can be written by every user (mode {stat.S_IMODE(mode):04o}), expected 0700; "
            "run chmod o-w on it or choose another store"
        )


def keep_private(database: Path) -> None:
    """Make a SQLite file that is missing, and tighten what an earlier version left wider.

    SQLite gives the files next to it the mode of the database. A group that may write to the store or to the
    directory may use them. Never raises: SQLite says what is wrong with a path.
    """
    with contextlib.suppress(OSError):
        directory = database.parent
        may_share = any(
            path.stat().st_mode & stat.S_IWGRP for path in (directory, directory.parent)
        )
        mode = 0o660 if may_share else 0o600
        try:
            # Closing a descriptor of our own would drop this process's locks on the file.
            os.mknod(database, stat.S_IFREG | mode)
            database.chmod(mode)  # whatever the umask is
        except FileExistsError:
            for end in ("", "-wal", "-shm", "-journal"):
                _tighten(database.with_name(f"{database.name}{end}"), mode)


def _tighten(path: Path, mode: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if is_ours and stat.S_IMODE(found.st_mode) & ~mode:
            path.chmod(stat.S_IMODE(found.st_mode) & mode)


def database_uri(path: Path, mode: str) -> str:
    """URI of a database in a mode of SQLite: ``ro``, ``rw`` or ``rwc``."""
    uri = f"file:{quote(os.fsencode(path.absolute()))}?mode={mode}"
    if mode != "ro" or os.access(path.parent, os.W_OK | os.X_OK):
        return uri
    # A reader of a WAL needs a file to share locks in. If it cannot create one, no other process writes, and
    # unless a log was left over, the database is complete.
    with contextlib.suppress(OSError):
        if path.with_name(f"{path.name}-wal").stat().st_size:
            return uri
    return f"{uri}&immutable=1"


def objects_of(database: sqlite3.Connection) -> set[tuple[str, str, str]]:
    """Kind, name and SQL of everything in the schema."""
    rows = database.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    return {(str(kind), str(name), str(sql or "")) for kind, name, sql in rows}


@cache
def objects_made_by(schema: str) -> frozenset[tuple[str, str, str]]:
    """:func:`objects_of` a database that these statements made."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.executescript(schema)
        return frozenset(objects_of(database))
