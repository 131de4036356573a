"""What can be wrong with an index: it is in the way for now, or it is not what we wrote.

Owns what SQLite's, diskcache's and filelock's errors mean for a store.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import diskcache

from blendrag.errors import StoreError, StoreFullError, is_out_of_space
from blendrag.store.index_check import DATABASE
from blendrag.store.sqlite_errors import is_foreign, primary_code

_IN_USE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, None)


class IndexLocked(StoreError):
    """Somebody holds the index, or the disk does not let us have it, for longer than we wait."""


class IndexOdd(StoreError):
    """The index is missing or is not what we wrote; rebuild it from the files."""


def held(directory: Path, by: str, wait_s: float) -> IndexLocked:
    """The index was not to be had for ``wait_s``."""
    return IndexLocked(
        f"index {directory} is held by {by} for {wait_s} s, expected it to be free within seconds; "
        "wait for the other one or stop it"
    )


def unusable(directory: Path, reason: object) -> IndexLocked:
    """The index cannot be used, for a reason that waiting alone may not remove."""
    return IndexLocked(
        f"index {directory} cannot be used now ({reason}), expected a working disk and a directory "
        "of our own; check both"
    )


@contextlib.contextmanager
def mapped(directory: Path, wait_s: float) -> Iterator[None]:
    """SQLite's and diskcache's errors as ours."""
    try:
        yield
    except diskcache.Timeout as exc:
        cause = (
            exc.__context__
        )  # any failure to begin a transaction is a Timeout of diskcache 5.6.3
        if isinstance(cause, sqlite3.Error) and primary_code(cause) not in _IN_USE:
            raise _ours(cause, directory) from exc
        raise held(directory, "another process", wait_s) from exc
    except sqlite3.Error as exc:
        raise _ours(exc, directory) from exc
    except UnicodeDecodeError as exc:  # SQLite's message quotes a damaged name
        raise IndexOdd(f"index {directory} is odd ({exc})") from exc


def _ours(error: sqlite3.Error, directory: Path) -> StoreError:
    if is_out_of_space(error):
        return StoreFullError(f"no space left for index {directory}; free some space", 1 << 20)
    if is_foreign(error) and not _says_so_itself(error, directory):
        return unusable(directory, error)
    return IndexOdd(f"index {directory} is odd ({error})")


def _says_so_itself(error: sqlite3.Error, directory: Path) -> bool:
    """Whether a database is not to be written for what is in it, and not for what it lies on."""
    writable = os.access(directory / DATABASE, os.W_OK) and os.access(directory, os.W_OK)
    return primary_code(error) == sqlite3.SQLITE_READONLY and writable
