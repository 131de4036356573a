"""One index row, and the serialisation that puts nothing else into diskcache's table.

diskcache unpickles values (CVE-2025-69872, no fixed release), keys while iterating, and reads and
deletes files that a row names. :class:`Rows` replaces all of that: one form of key, one form of
value, no file touched, nothing unpickled, in any mode.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import diskcache
from diskcache.core import ENOVAL, MODE_RAW

from blendrag.store.files import Name
from blendrag.store.format import is_name
from blendrag.store.identity import digest_fields
from blendrag.store.index_check import SETTINGS
from blendrag.store.index_errors import IndexOdd

logger = logging.getLogger("blendrag.store")

#: Settings of diskcache that are PRAGMAs begin like this.
_PRAGMA = "sqlite_"
_VALUE = re.compile(r"([0-9a-f]{64})/([0-9a-f]{64})\.([0-9a-f]{16}):([0-9]{1,15})", re.ASCII)


@dataclass(frozen=True)
class Row:
    """One indexed payload."""

    name: Name
    size_bytes: int

    def encode(self) -> str:
        name = self.name
        return f"{name.namespace}/{name.key}.{name.nonce}:{self.size_bytes}"

    @staticmethod
    def decode(text: object) -> Row:
        match = _VALUE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise IndexOdd("an index row is not of the form the store writes")
        return Row(Name(match[1], match[2], match[3]), int(match[4]))


class Rows(diskcache.Disk):
    """Serialisation of rows: text in, text out, nothing else in either direction."""

    def put(self, key: Any) -> tuple[str, bool]:
        if not is_name(key):
            raise IndexOdd("an index key is not 64 hex digits")
        return key, True

    def get(self, key: Any, raw: Any) -> str:
        if raw != 1 or not is_name(key):
            raise IndexOdd("an index key is not 64 hex digits")
        return key

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, None, str]:
        return Row.decode(value).size_bytes, MODE_RAW, None, value

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> str:
        if mode != MODE_RAW or filename is not None or read:
            raise IndexOdd("an index row points outside the index")
        return Row.decode(value).encode()

    def filename(self, key: Any = None, value: Any = None) -> NoReturn:
        raise IndexOdd("the index keeps no files")

    def remove(self, file_path: Any) -> None:
        logger.warning("index row names a file, which is left alone")


class RowCache(diskcache.Cache):
    """diskcache's table of rows, with bounded waits, in the file that it is told.

    diskcache 5.6.3 repeats a locked statement outside a transaction, and every PRAGMA, for 60 s; here
    they wait as long as configured. It takes the PRAGMAs of each further connection from the database;
    here they are the ones we set. And it expands ``~`` and ``$NAME`` in the directory it is given, so
    that one is not given: the path is ours.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        super().__init__(os.curdir, timeout_s, disk=Rows, **SETTINGS)

    @property
    def _con(self) -> sqlite3.Connection:
        """This thread's connection. An index never hands a cache on to a forked process."""
        connection: sqlite3.Connection | None = getattr(self._local, "con", None)
        if connection is None:
            connection = _connected(self._path, self._timeout)
            self._local.con, self._local.pid = connection, os.getpid()
        return connection

    @property
    def _sql_retry(self) -> Any:
        return self._sql

    def reset(self, key: str, value: Any = ENOVAL, update: bool = True) -> Any:
        """See ``diskcache.Cache.reset``; PRAGMAs are set already, by :attr:`_con`."""
        if key.startswith(_PRAGMA):
            setattr(self, key, value)
            return value
        try:
            return super().reset(key, value, update)
        except ValueError as exc:  # diskcache takes apart what it finds
            raise IndexOdd(f"the index has no setting {key}") from exc

    def schema_version(self) -> int:
        """Another one as soon as anybody changes a table, an index or a trigger."""
        ((version,),) = self._sql("PRAGMA schema_version").fetchall()
        return int(version)

    def checkpoint(self) -> bool:
        """fsync every commit so far, into the database itself; whether all of it got there."""
        ((busy, pages, written),) = self._sql("PRAGMA wal_checkpoint(FULL)").fetchall()
        return not busy and pages == written


def _connected(path: Path, timeout_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None)
    try:
        for name, value in sorted(SETTINGS.items()):
            if name.startswith(_PRAGMA):
                connection.execute(f"PRAGMA {name.removeprefix(_PRAGMA)} = {value}").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def row_key(namespace: str, key: str) -> str:
    """Key of a row: namespaces never share one."""
    return digest_fields([namespace.encode(), key.encode()])
