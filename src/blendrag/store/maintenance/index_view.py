"""The rows of an index as they are, for who must not change a thing.

Opened read-only and only if it is exactly what we make (:mod:`index_check`); diskcache, which writes
when it opens, is not asked. Every row has to be of the store's own form: nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from blendrag.store.files import Name
from blendrag.store.index_check import DATABASE, connect_for_reading, fault
from blendrag.store.index_database import QUERY_WAIT_S
from blendrag.store.index_errors import IndexOdd, mapped
from blendrag.store.index_files import UNFINISHED
from blendrag.store.rows import Row, Rows, row_key

_COLUMNS = "rowid, key, raw, mode, filename, value"
#: Rows read at once, so that no read transaction lasts.
_PAGE_ROWS = 1000
_WAIT_S = 20 * QUERY_WAIT_S


class IndexView:
    """Raises :class:`IndexOdd` for what the store did not write, :class:`IndexLocked` in its way."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        if not (directory / DATABASE).exists():
            raise IndexOdd("there is none")
        if (directory / UNFINISHED).exists():
            raise IndexOdd("its rebuild was not finished")
        with mapped(directory, _WAIT_S):
            reason = fault(directory, _WAIT_S)
            if reason is not None:
                raise IndexOdd(reason)
            self._connection = connect_for_reading(directory, _WAIT_S)
        self._rows = Rows(str(directory))

    def __enter__(self) -> IndexView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def knows(self, name: Name) -> bool:
        """Whether the row of that key points to exactly this file."""
        found = self._select("WHERE key = ? AND raw = 1", row_key(name.namespace, name.key))
        return bool(found) and self._row(*found[0]).name == name

    def __iter__(self) -> Iterator[Row]:
        """All rows, least recently used first."""
        last = -1
        while page := self._select(f"WHERE rowid > ? ORDER BY rowid LIMIT {_PAGE_ROWS}", last):
            for values in page:
                yield self._row(*values)
            last = page[-1][0]

    def _select(self, condition: str, value: Any) -> list[tuple[Any, ...]]:
        with mapped(self._directory, _WAIT_S):
            query = f"SELECT {_COLUMNS} FROM Cache {condition}"
            return self._connection.execute(query, (value,)).fetchall()

    def _row(self, rowid: int, key: Any, raw: Any, mode: Any, filename: Any, value: Any) -> Row:
        row = Row.decode(self._rows.fetch(mode, filename, value, read=False))
        if row_key(row.name.namespace, row.name.key) != self._rows.get(key, raw):
            raise IndexOdd("an index row belongs to another key")
        return row
