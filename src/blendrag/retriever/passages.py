"""Rows of documents, chunks and the passages that join them.

Owns the statements that keep a text once, however many documents hold it. Does not know
transactions, locks or indexes: every function runs inside its caller's.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blendrag.chunking import Chunk
from blendrag.readers import Document, MetadataValue
from blendrag.retriever import anchor_rows
from blendrag.retriever.database import ENTRY


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
    return StoredChunk(
        chunk_id, text, tokens, title, shown_source(source), start, end, json.loads(metadata)
    )


def entry_source(entry_id: str, shown: str) -> str:
    """Source of the document of an entry: no other entry has it, nor has a file."""
    return ENTRY + json.dumps([entry_id, shown])


def shown_source(source: str) -> str:
    """A document's source as a reader is told it."""
    return str(json.loads(source[len(ENTRY) :])[1]) if source.startswith(ENTRY) else source


def entry_id_of(source: str) -> str | None:
    """The id of the entry whose document this is, None for any other document."""
    return str(json.loads(source[len(ENTRY) :])[0]) if source.startswith(ENTRY) else None


def is_of(source: str, path: Path | str) -> bool:
    """Whether a document was read from that file, or from one below that directory."""
    if source.startswith(ENTRY):
        return False
    name = Path(path).as_posix()
    if name == ".":
        return not source.startswith(("/", "../"))
    return source == name or source.startswith((f"{name}#", f"{name.rstrip('/')}/"))


def insert_document(
    connection: sqlite3.Connection,
    document: Document,
    digest: str,
    chunks: Sequence[Chunk],
    vectors: np.ndarray,
) -> int:
    """Adds a document that is not there; its row. ``vectors``: float32 [len(chunks), dim]."""
    (document_row,) = connection.execute(
        "INSERT INTO document (source, title, digest, metadata) VALUES (?, ?, ?, ?) RETURNING id",
        (document.source, document.title, digest, json.dumps(dict(document.metadata))),
    ).fetchone()
    for chunk, vector in zip(chunks, vectors, strict=True):
        connection.execute(
            "INSERT INTO passage (document, chunk, start, end, vector) VALUES (?, ?, ?, ?, ?)",
            (document_row, _chunk_row(connection, chunk), chunk.start, chunk.end, vector.tobytes()),
        )
    return int(document_row)


def _chunk_row(connection: sqlite3.Connection, chunk: Chunk) -> int:
    """Row of the chunk, stored if it is new."""
    found = connection.execute(
        "SELECT id FROM chunk WHERE chunk_id = ?", (chunk.chunk_id,)
    ).fetchone()
    if found is None:
        found = connection.execute(
            "INSERT INTO chunk (chunk_id, text, tokens) VALUES (?, ?, ?) RETURNING id",
            (chunk.chunk_id, chunk.text, chunk.tokens),
        ).fetchone()
        anchor_rows.insert(connection, [(found[0], chunk.chunk_id, chunk.text)])
        connection.execute("DELETE FROM dropped WHERE chunk_id = ?", (chunk.chunk_id,))
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
    """Removes those chunks that no passage refers to; their ids.

    Their texts are remembered as dropped, as their KV is still there.
    """
    orphans: list[tuple[str, str]] = []
    for row in dict.fromkeys(suspects):
        orphans += connection.execute(
            "DELETE FROM chunk WHERE id = ? AND NOT EXISTS "
            "(SELECT 1 FROM passage WHERE chunk = ?) RETURNING chunk_id, text",
            (row, row),
        ).fetchall()
    connection.executemany("INSERT OR REPLACE INTO dropped VALUES (?, ?, 0)", orphans)
    return [chunk_id for chunk_id, _ in orphans]
