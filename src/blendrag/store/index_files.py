"""The files of an index that are not SQLite's business: is one there, set all aside, the mark of a rebuild.

Caller holds the index lock, except to ask whether a file exists.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from blendrag.store.directories import sync_directory
from blendrag.store.index_check import DATABASE_FILES, JOURNAL
from blendrag.store.index_errors import unusable

#: There while the index does not know of all files: a rebuild is going on, or was interrupted.
UNFINISHED = "unfinished"
_MARK = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def exists(directory: Path, name: str) -> bool:
    """Whether there is a file of that name. Raises :class:`IndexLocked` for one that cannot be looked
    for: that is no such answer."""
    try:
        os.lstat(directory / name)
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise unusable(directory, exc.strerror or exc) from exc
    return True


def mark_unfinished(directory: Path) -> None:
    """Say, durably, that the index is not to be believed."""
    os.close(os.open(directory / UNFINISHED, _MARK, 0o600))
    sync_directory(directory)


def set_aside(directory: Path) -> None:
    """Move a database and all that SQLite keeps beside it to the quarantine."""
    quarantine = directory.parent / "quarantine"
    for name in (*DATABASE_FILES, JOURNAL):
        try:
            os.replace(directory / name, quarantine / name)
        except FileNotFoundError:
            pass
        except OSError:  # a directory, here or there, is none of SQLite's and stays apart
            os.replace(directory / name, quarantine / f"{name}.{secrets.token_hex(8)}")
