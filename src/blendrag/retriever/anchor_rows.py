"""The table of anchors: what is known of each chunk's text to find it in a prompt.

Owns how a row is written and read. A row's id is never given twice (AUTOINCREMENT), so that what is new
is what has a higher id than any before; it goes with its chunk.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator

import numpy as np

from blendrag.anchors import AnchorRow, row_of

#: Select of :func:`anchor_row`'s columns behind the row's id, to be followed by a condition.
ANCHOR = "SELECT id, chunk_id, anchor_hash, length, digest, heads FROM anchor"
_INSERT = (
    "INSERT INTO anchor (chunk, chunk_id, anchor_hash, length, digest, heads) "
    "VALUES (?, ?, ?, ?, ?, ?)"
)


def insert(connection: sqlite3.Connection, chunks: Iterable[tuple[int, str, str]]) -> None:
    """Adds rows of chunks: of their row in the corpus, their id and text."""
    connection.executemany(_INSERT, _values(chunks))


def _values(chunks: Iterable[tuple[int, str, str]]) -> Iterator[tuple]:
    for chunk, chunk_id, text in chunks:
        *row, heads = row_of(chunk_id, text)
        yield chunk, *row, np.array(heads, "<i8").tobytes()


def anchor_row(row: tuple) -> AnchorRow:
    _, chunk_id, anchor_hash, length, digest, heads = row
    return AnchorRow(
        chunk_id, anchor_hash, length, digest, tuple(np.frombuffer(heads, "<i8").tolist())
    )
