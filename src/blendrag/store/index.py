"""A disposable index over the payload files: which there are, how large, how recently used.

diskcache is used for its SQLite table and nothing more: its serialisation is replaced by
:class:`Rows`, its eviction is off, its endless retries are cut.

The order of rows is the logical clock: an entry put or used goes to the end. No time of day is
ever compared. Writes happen under one lock across threads and processes, because SQLite up to
3.51.2 can corrupt a WAL that is written and checkpointed at once.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import diskcache

from blendrag.store.files import Name
from blendrag.store.index_database import IndexDatabase
from blendrag.store.index_errors import IndexOdd
from blendrag.store.rows import Row, row_key


class Index(IndexDatabase):
    """The rows of one store. Methods raise as those of :class:`IndexDatabase`."""

    def __init__(
        self, directory: Path, lock_timeout_s: float = 10.0, busy_timeout_s: float = 1.0
    ) -> None:
        super().__init__(directory, lock_timeout_s, busy_timeout_s)
        self._transaction_pid = 0

    def get(self, namespace: str, key: str) -> Row | None:
        """The row of a key. Takes no lock."""
        with self._mapped():
            value = self._current().get(row_key(namespace, key))
        if value is None:
            return None
        row = Row.decode(value)
        if row.name.namespace != namespace or row.name.key != key:
            raise IndexOdd("an index row belongs to another key")
        return row

    def add(self, row: Row) -> None:
        """Insert as the most recently used."""
        with self._writing() as cache:
            self._renew(cache, row)

    def drop(self, names: Iterable[Name]) -> None:
        """Delete the rows that point to exactly these files."""
        with self._writing() as cache:
            for name in names:
                row = self.get(name.namespace, name.key)
                if row is not None and row.name == name:
                    cache.delete(row_key(name.namespace, name.key))

    def touch(self, used: Iterable[tuple[str, str]]) -> None:
        """Move the rows of ``(namespace, key)`` to the end, in this order."""
        with self._writing() as cache:
            for namespace, key in used:
                row = self.get(namespace, key)
                if row is not None:
                    self._renew(cache, row)

    @staticmethod
    def _renew(cache: diskcache.Cache, row: Row) -> None:
        key = row_key(row.name.namespace, row.name.key)
        cache.delete(key)
        cache.set(key, row.encode())

    def oldest(self) -> Iterator[Row]:
        """All rows, least recently used first."""
        with self._mapped():
            cache = self._current()
            try:
                for key in cache:
                    value = cache.get(key)
                    if value is None:
                        continue
                    row = Row.decode(value)
                    if row_key(row.name.namespace, row.name.key) != key:
                        raise IndexOdd("an index row belongs to another key")
                    yield row
            except OverflowError as exc:  # diskcache adds one to the last row's number
                raise IndexOdd("the rows of the index are numbered out of range") from exc

    def totals(self) -> tuple[int, int]:
        """Entries and bytes, as SQLite counts them within the same transactions."""
        with self._mapped():
            cache = self._current()
            totals = cache.reset("count"), cache.reset("size")
        if not all(type(total) is int and total >= 0 for total in totals):
            raise IndexOdd("the index does not count its rows")
        return totals

    @contextlib.contextmanager
    def _writing(self) -> Iterator[diskcache.Cache]:
        with self.exclusive(), self._mapped():
            cache = self._current()
            if self._transaction_pid == os.getpid():
                yield cache
                return
            self._transaction_pid = os.getpid()
            try:
                with cache.transact():
                    if cache.schema_version() != self._schema_version:
                        raise IndexOdd("the schema of the index was changed")  # a trigger would run
                    yield cache
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    cache.close()  # a failed COMMIT must not leave a transaction open
                raise
            finally:
                self._transaction_pid = 0

    def transaction(self) -> contextlib.AbstractContextManager[Any]:
        """Several writes as one. Reentrant with the write methods."""
        return self._writing()
