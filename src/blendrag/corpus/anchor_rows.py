"""The table of anchors: what is known of each chunk's text to find it in a prompt.

Owns how a row is written. A row's id is never given twice (AUTOINCREMENT), so that what is new
is what has a higher id than any before; it goes with its chunk.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from blendrag.corpus.rows import ANCHOR
from blendrag.text.recognition.rows import packed, row_of


def insert(connection: sqlite3.Connection, chunks: Iterable[tuple[int, str, str]]) -> None:
    """Adds rows of chunks: of their row in the corpus, their id and text."""
    for chunk, chunk_id, text in chunks:
        ANCHOR.add(connection, chunk, chunk_id, packed(row_of(chunk_id, text)))
