"""An open corpus file: one connection under one lock, transactions, and its small settings.

Owns who may use the connection when. Does not know what the tables mean (see
:mod:`blendrag.retriever.database` for the schema).
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blendrag.errors import CorpusError
from blendrag.retriever import database
from blendrag.retriever.database_errors import mapped


class CorpusFile:
    """Usable from several threads; several processes may use the file at once."""

    def __init__(
        self, directory: Path, connection: sqlite3.Connection, read_only: bool = False
    ) -> None:
        self.directory = directory
        self.read_only = read_only
        self.path = directory / database.FILE_NAME
        self.connection = connection
        self.lock = threading.RLock()
        self.closed = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self.lock:
            self.check_open()
            if self.read_only:
                raise CorpusError(
                    f"the corpus at {self.directory} is read-only, expected one that can be "
                    "written; change its permissions or choose another --store"
                )
            with database.transaction(self.connection, self.path):
                yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Everything read within is of one state of the file, whoever writes meanwhile."""
        with self.lock:
            self.check_open()
            with database.transaction(self.connection, self.path, reads_only=True):
                yield

    def close(self) -> None:
        """Closes the connection. Closing twice is no error."""
        with self.lock:
            if not self.closed:
                self.connection.close()
                self.closed = True

    def rows(self, query: str, *parameters: str | float) -> list[tuple]:
        with self.lock:
            self.check_open()
            try:
                return self.connection.execute(query, parameters).fetchall()
            except sqlite3.Error as exc:
                raise mapped(exc, self.path) from exc

    def check_open(self) -> None:
        if self.closed:
            raise CorpusError(f"the corpus at {self.directory} is closed; open it again")

    def generation(self) -> int:
        return int(self.meta("generation") or 0)

    def meta(self, key: str) -> str | None:
        rows = self.rows("SELECT value FROM meta WHERE key = ?", key)
        return rows[0][0] if rows else None

    def set_meta(self, key: str, value: str) -> None:
        """Inside a transaction."""
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
