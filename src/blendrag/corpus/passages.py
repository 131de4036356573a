"""Rows of documents, chunks and the passages that join them.

Owns the statements that keep a text once, however many documents hold it. Does not know
transactions, locks or indexes: every function runs inside its caller's.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blendrag.corpus import anchor_rows
from blendrag.corpus.database import ENTRY
from blendrag.corpus.file import CorpusFile
from blendrag.corpus.rows import CHUNK, DOCUMENT, DROPPED, PASSAGE, DamagedRow
from blendrag.text.chunking import Chunk
from blendrag.text.readers.document import Document, MetadataValue


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


#: Tables of a :data:`PLACE`, in the order of its columns.
PLACE_TABLES = (PASSAGE, CHUNK, DOCUMENT)
#: Select of a chunk at a place, to be followed by a condition.
PLACE = (
    f"SELECT {', '.join(table.selected for table in PLACE_TABLES)} FROM passage "
    "JOIN chunk ON chunk.id = passage.chunk JOIN document ON document.id = passage.document"
)


class Place(NamedTuple):
    """A sound row of :data:`PLACE`."""

    passage: int
    document: int
    chunk: Chunk
    source: str
    """As stored, see :func:`shown_source`."""
    title: str
    metadata: dict[str, Any]
    digest: str
    """Of the document, as it was given."""
    vector: bytes

    @property
    def stored(self) -> StoredChunk:
        text, start, end, tokens, chunk_id = (
            self.chunk.text, self.chunk.start, self.chunk.end, self.chunk.tokens, self.chunk.chunk_id,
        )  # fmt: skip
        source = shown_source(self.source)
        return StoredChunk(chunk_id, text, tokens, self.title, source, start, end, self.metadata)


def place(file: CorpusFile, row: Sequence[Any]) -> Place | None:
    """``None`` for a damaged row, which is warned about."""
    checked = file.checked(row, *PLACE_TABLES)
    if checked is None:
        return None
    (passage, document, _, start, end, vector), (_, chunk_id, text, tokens), of = checked
    _, source, title, digest, metadata, _ = of
    chunk = Chunk(text, start, end, tokens, chunk_id)
    return Place(passage, document, chunk, source, title, metadata, digest, vector)


def places(file: CorpusFile, condition: str, *parameters: str | float) -> list[Place]:
    """Sound rows of :data:`PLACE` that meet a condition."""
    rows = file.rows(f"{PLACE} {condition}", *parameters)
    return [found for row in rows if (found := place(file, row)) is not None]


def at(file: CorpusFile, passage: int) -> Place | None:
    """The place of a passage that the index knows; ``None``, and a warning, where it is damaged."""
    rows = file.rows(f"{PLACE} WHERE passage.id = ?", passage)
    if not rows:  # its chunk or its document is lost
        file.warn_damaged(f"passage {passage}")
        return None
    return place(file, rows[0])


def entry_source(entry_id: str, shown: str) -> str:
    """Source of the document of an entry: no other entry has it, nor has a file."""
    return ENTRY + json.dumps([entry_id, shown])


def shown_source(source: str) -> str:
    """A document's source as a reader is told it."""
    named = _entry_named(source)
    return source if named is None else named[1]


def entry_id_of(source: str) -> str | None:
    """The id of the entry whose document this is, None for any other document."""
    named = _entry_named(source)
    return None if named is None else named[0]


def _entry_named(source: str) -> tuple[str, str] | None:
    """What :func:`entry_source` was made of; ``None`` for anything else."""
    if not source.startswith(ENTRY):
        return None
    try:
        entry_id, shown = json.loads(source[len(ENTRY) :])
    except (ValueError, TypeError, RecursionError):
        return None
    return str(entry_id), str(shown)


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
    metadata = json.dumps(dict(document.metadata))
    document_row = DOCUMENT.add(
        connection, document.source, document.title, digest, metadata, len(chunks)
    )
    for chunk, vector in zip(chunks, vectors, strict=True):
        chunk_row = _chunk_row(connection, chunk)
        PASSAGE.add(connection, document_row, chunk_row, chunk.start, chunk.end, vector.tobytes())
    return document_row


def _chunk_row(connection: sqlite3.Connection, chunk: Chunk) -> int:
    """Row of the chunk, stored if it is new and mended if it is damaged."""
    found = connection.execute(
        f"SELECT {CHUNK.selected} FROM chunk WHERE chunk_id = ?", (chunk.chunk_id,)
    ).fetchone()
    if found is None:
        row = CHUNK.add(connection, chunk.chunk_id, chunk.text, chunk.tokens)
        anchor_rows.insert(connection, [(row, chunk.chunk_id, chunk.text)])
        connection.execute("DELETE FROM dropped WHERE chunk_id = ?", (chunk.chunk_id,))
        return row
    row = int(found[0])
    try:
        CHUNK.checked(found)
    except DamagedRow:
        connection.execute(
            "UPDATE chunk SET chunk_id = ?, text = ?, tokens = ? WHERE id = ?",
            (chunk.chunk_id, chunk.text, chunk.tokens, row),
        )
        CHUNK.seal(connection, row, chunk.chunk_id, chunk.text, chunk.tokens)
    return row


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
    orphans: list[str] = []
    for row in dict.fromkeys(suspects):
        deleted = connection.execute(
            "DELETE FROM chunk WHERE id = ? AND NOT EXISTS "
            f"(SELECT 1 FROM passage WHERE chunk = ?) RETURNING {CHUNK.selected}",
            (row, row),
        ).fetchall()
        for each in deleted:
            with suppress(
                DamagedRow
            ):  # the KV of a text that nobody knows stays until it is evicted
                _, chunk_id, text, _ = CHUNK.checked(each)
                DROPPED.put(connection, chunk_id, text, 0.0)
                orphans.append(chunk_id)
    return orphans
