"""Rows of the corpus's tables, each with a digest that is written with it and checked when it is read.

Owns the columns, their types and the digest. Does not know which rows belong together. A digest keeps
out damage, not a forger: types are checked as well, so that a forged row raises nothing else.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash


class Json:
    """Kind of a column that holds a JSON object as text; it is read as a ``dict``."""


class DamagedRow(Exception):
    """A row is not what was written; says which."""


@dataclass(frozen=True)
class Table:
    """A table: names and kinds of its columns, the first of which is its key."""

    name: str
    columns: tuple[tuple[str, tuple[type, ...]], ...]

    @property
    def selected(self) -> str:
        """All columns and the digest, for a SELECT."""
        names = [*(name for name, _ in self.columns), "row_digest"]
        return ", ".join(f"{self.name}.{name}" for name in names)

    @property
    def width(self) -> int:
        """Columns of :attr:`selected`."""
        return len(self.columns) + 1

    def checked(self, row: Sequence[Any]) -> tuple[Any, ...]:
        """Values of a row of :attr:`selected`. Raises :class:`DamagedRow`."""
        *values, digest = row
        try:
            if digest == self.digest(values):
                return tuple(
                    _checked(value, kinds)
                    for value, (_, kinds) in zip(values, self.columns, strict=True)
                )
        except (TypeError, ValueError, RecursionError):
            pass
        raise DamagedRow(f"{self.name} {values[0]!r:.80}")

    def digest(self, values: Sequence[Any]) -> bytes:
        """xxh3-128 over the name of the table and the length-prefixed values."""
        parts = [self.name.encode()]
        for value in values:
            data = _encoded(value)
            parts += (b"%d:" % len(data), data)
        return xxhash.xxh3_128_digest(b"".join(parts))

    def put(self, connection: sqlite3.Connection, *values: Any) -> None:
        """Writes a row in place of an earlier one of the same key."""
        marks = ", ".join("?" * self.width)
        connection.execute(
            f"INSERT OR REPLACE INTO {self.name} VALUES ({marks})", (*values, self.digest(values))
        )

    def add(self, connection: sqlite3.Connection, *values: Any) -> int:
        """Writes a new row; the key that it gets. ``values``: of the other columns."""
        names = ", ".join(name for name, _ in self.columns[1:])
        marks = ", ".join("?" * len(values))
        (key,) = connection.execute(
            f"INSERT INTO {self.name} ({names}, row_digest) VALUES ({marks}, x'') "
            f"RETURNING {self.columns[0][0]}",
            values,
        ).fetchone()
        self.seal(connection, key, *values)
        return int(key)

    def seal(self, connection: sqlite3.Connection, *values: Any) -> None:
        """Writes the digest of a row that has these values."""
        connection.execute(
            f"UPDATE {self.name} SET row_digest = ? WHERE {self.columns[0][0]} = ?",
            (self.digest(values), values[0]),
        )


def _encoded(value: Any) -> bytes:
    """A value with its type. Raises :class:`TypeError`."""
    if isinstance(value, str):
        # surrogateescape: text that is no UTF-8 is read as such, see database.open_database
        return b"t" + value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return b"b" + value
    if isinstance(value, int):
        return b"i%d" % value
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if value is None:
        return b"n"
    raise TypeError(f"a {type(value).__name__} in a row")


def _checked(value: Any, kinds: tuple[type, ...]) -> Any:
    if kinds == (Json,):
        value, kinds = json.loads(value), (dict,)
    if not isinstance(value, kinds):
        raise TypeError(f"a {type(value).__name__}, expected {kinds}")
    if isinstance(value, str):
        value.encode("utf-8")  # raises UnicodeEncodeError for what was no UTF-8
    return value


META = Table("meta", (("key", (str,)), ("value", (str,))))
DOCUMENT = Table(
    "document",
    (
        ("id", (int,)), ("source", (str,)), ("title", (str,)), ("digest", (str,)),
        ("metadata", (Json,)), ("passages", (int,)),
    ),
)  # fmt: skip
CHUNK = Table("chunk", (("id", (int,)), ("chunk_id", (str,)), ("text", (str,)), ("tokens", (int,))))
PASSAGE = Table(
    "passage",
    (
        ("id", (int,)), ("document", (int,)), ("chunk", (int,)), ("start", (int,)), ("end", (int,)),
        ("vector", (bytes,)),
    ),
)  # fmt: skip
ENTRY = Table(
    "entry",
    (("id", (str,)), ("document", (int,)), ("parent", (str,)), ("given", (str, type(None)))),
)
ANCHOR = Table(
    "anchor", (("id", (int,)), ("chunk", (int,)), ("chunk_id", (str,)), ("packed", (bytes,)))
)
DROPPED = Table("dropped", (("chunk_id", (str,)), ("text", (str,)), ("since", (float,))))
TABLES = (META, DOCUMENT, CHUNK, PASSAGE, ENTRY, ANCHOR, DROPPED)
