"""An open corpus file: one connection under one lock, transactions, and its small settings.

Owns who may use the connection when. Does not know what the tables mean (see
:mod:`blendrag.corpus.database` for the schema).
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blendrag.corpus import database
from blendrag.corpus.database_errors import damaged_settings, mapped
from blendrag.corpus.rows import META, DamagedRow, Table
from blendrag.errors import CorpusError, check_unicode

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)


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
        self._damaged: set[str] = set()

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
        for value in parameters:
            if isinstance(value, str):
                check_unicode(value, "an id, source or title")
        with self.lock:
            self.check_open()
            try:
                return self.connection.execute(query, parameters).fetchall()
            except (sqlite3.Error, UnicodeDecodeError) as exc:
                raise mapped(exc, self.path) from exc

    def checked(self, row: Sequence[Any], *tables: Table) -> list[tuple[Any, ...]] | None:
        """Values of a joined row, a tuple for each table; ``None`` where one of them is damaged.

        A damaged row is warned about once.
        """
        values, at = [], 0
        try:
            for table in tables:
                values.append(table.checked(row[at : at + table.width]))
                at += table.width
        except DamagedRow as exc:
            self.warn_damaged(str(exc))
            return None
        return values

    def warn_damaged(self, what: str) -> None:
        """Say once that something is left out."""
        if what not in self._damaged:
            self._damaged.add(what)
            logger.warning(
                "the corpus at %s is damaged: row %s is not what was written and is left out; run "
                "blendrag store check --repair, then ingest again",
                self.directory,
                what,
            )

    def check_open(self) -> None:
        if self.closed:
            raise CorpusError(f"the corpus at {self.directory} is closed; open it again")

    def generation(self) -> int:
        return self.number("generation") or 0

    def number(self, key: str) -> int | None:
        """A setting that is a number. Raises :class:`CorpusError` for anything else."""
        value = self.meta(key)
        if value is None:
            return None
        if not _NUMBER.fullmatch(value):
            raise damaged_settings(f"setting {key} is {value!r:.40}", self.path)
        return int(value)

    def meta(self, key: str) -> str | None:
        """A setting. Raises :class:`CorpusError` where any of them is damaged: it might be this one."""
        rows = self.rows(f"SELECT {META.selected} FROM meta LIMIT 100")
        try:
            settings = dict(META.checked(row) for row in rows)
        except DamagedRow as exc:
            raise damaged_settings(f"row {exc}", self.path) from exc
        return settings.get(key)

    def set_meta(self, key: str, value: str) -> None:
        """Inside a transaction."""
        META.put(self.connection, key, value)
