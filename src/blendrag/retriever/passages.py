"""Rows of documents, chunks and the passages that join them.

Owns the statements that keep a text once, however many documents hold it. Does not know
transactions, locks or indexes: every function runs inside its caller's.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from blendrag.anchors import AnchorIndex
from blendrag.chunking import Chunk
from blendrag.readers import Document, MetadataValue


@dataclass(frozen=True)
class StoredChunk:
    """A chunk at one place of one document: ``document.text[start:end]``."""

    chunk_id: str
    text: str
    tokens: int
    title: str
    source: str
    start: int
    end: int
    metadata: Mapping[str, MetadataValue]


#: Select of :func:`stored_chunk`'s columns, to be followed by a condition.
STORED_CHUNK = (
    "SELECT chunk_id, text, tokens, title, source, start, end, metadata FROM passage "
    "JOIN chunk ON chunk.id = passage.chunk JOIN document ON document.id = passage.document"
)


def stored_chunk(row: tuple) -> StoredChunk:
    chunk_id, text, tokens, title, source, start, end, metadata = row
    return StoredChunk(chunk_id, text, tokens, title, source, start, end, json.loads(metadata))


def insert_document(
    connection: sqlite3.Connection,
    document: Document,
    digest: str,
    chunks: Sequence[Chunk],
    vectors: np.ndarray,
) -> None:
    """Adds a document that is not there. ``vectors``: float32 [len(chunks), dim]."""
    (document_row,) = connection.execute(
        "INSERT INTO document (source, title, digest, metadata) VALUES (?, ?, ?, ?) RETURNING id",
        (document.source, document.title, digest, json.dumps(dict(document.metadata))),
    ).fetchone()
    for chunk, vector in zip(chunks, vectors, strict=True):
        connection.execute(
            "INSERT INTO passage (document, chunk, start, end, vector) VALUES (?, ?, ?, ?, ?)",
            (document_row, _chunk_row(connection, chunk), chunk.start, chunk.end, vector.tobytes()),
        )


def _chunk_row(connection: sqlite3.Connection, chunk: Chunk) -> int:
    """Row of the chunk, stored if it is new."""
    found = connection.execute(
        "SELECT id FROM chunk WHERE chunk_id = ?", (chunk.chunk_id,)
    ).fetchone()
    if found is None:
        _, *anchor = AnchorIndex.row_of(chunk.chunk_id, chunk.text)
        found = connection.execute(
            "INSERT INTO chunk (chunk_id, text, tokens, anchor_hash, length, digest) "
            "VALUES (?, ?, ?, ?, ?, ?) RETURNING id",
            (chunk.chunk_id, chunk.text, chunk.tokens, *anchor),
        ).fetchone()
    return int(found[0])


def delete_document(connection: sqlite3.Connection, source: str) -> list[int]:
    """Removes the document, if it is there, and its passages; rows of the chunks that it held."""
    rows = connection.execute(
        "SELECT DISTINCT chunk FROM passage JOIN document ON document.id = passage.document "
        "WHERE source = ?",
        (source,),
    ).fetchall()
    connection.execute("DELETE FROM document WHERE source = ?", (source,))
    return [row[0] for row in rows]


def drop_orphans(connection: sqlite3.Connection, suspects: Sequence[int]) -> list[str]:
    """Removes those chunks that no passage refers to; their ids."""
    orphans: list[tuple[str]] = []
    for row in dict.fromkeys(suspects):
        orphans += connection.execute(
            "DELETE FROM chunk WHERE id = ? AND NOT EXISTS "
            "(SELECT 1 FROM passage WHERE chunk = ?) RETURNING chunk_id",
            (row, row),
        ).fetchall()
    return [chunk_id for (chunk_id,) in orphans]
