"""Chunks as they are stored, read by id or document.

Owns the reading. Does not know how they came there, or how one is found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blendrag.corpus import passages
from blendrag.corpus.file import CorpusFile
from blendrag.corpus.passages import StoredChunk
from blendrag.corpus.rows import CHUNK, DOCUMENT
from blendrag.corpus.vectors import vector_of
from blendrag.text.chunking import Chunk


class StoredChunks:
    """The chunks of one corpus."""

    def __init__(self, file: CorpusFile) -> None:
        self._file = file

    def __len__(self) -> int:
        """Number of different chunks."""
        return int(self._file.rows("SELECT count(*) FROM chunk")[0][0])

    def __bool__(self) -> bool:
        """An empty corpus is a corpus."""
        return True

    def chunk_ids(self) -> list[str]:
        """Ids of all chunks, in the order they were first stored."""
        return [row[0] for row in self._file.rows("SELECT chunk_id FROM chunk ORDER BY id")]

    def chunks_of(self, source: str) -> list[Chunk]:
        """Chunks of one document, in its order; none where it is not there."""
        return [found.chunk for found in self._places_of(source)]

    def unchanged(self, source: str, digest: str) -> list[Chunk] | None:
        """:meth:`chunks_of`, if the document is there with that digest and no row of it is damaged."""
        rows = self._file.rows(f"SELECT {DOCUMENT.selected} FROM document WHERE source = ?", source)
        document = self._file.checked(rows[0], DOCUMENT) if rows else None
        if document is None:
            return None
        _, of, _, stored_digest, _, passages_there = document[0]
        places = self._places_of(source)
        if (of, stored_digest, passages_there) != (source, digest, len(places)):
            return None
        return [found.chunk for found in places]

    def _places_of(self, source: str) -> list[passages.Place]:
        found = passages.places(self._file, "WHERE source = ? ORDER BY start", source)
        return [each for each in found if each.source == source]

    def text(self, chunk_id: str) -> str:
        """Canonical text of a chunk. Raises :class:`KeyError` where it is not there."""
        rows = self._file.rows(f"SELECT {CHUNK.selected} FROM chunk WHERE chunk_id = ?", chunk_id)
        found = self._file.checked(rows[0], CHUNK) if rows else None
        if found is None or found[0][1] != chunk_id:
            raise KeyError(chunk_id)
        return str(found[0][2])

    def chunk(self, chunk_id: str) -> StoredChunk:
        """A chunk at the first place it was stored for. Raises :class:`KeyError`."""
        rows = self._file.rows(
            f"{passages.PLACE} WHERE chunk_id = ? ORDER BY passage.id LIMIT 16", chunk_id
        )
        for row in rows:
            found = passages.place(self._file, row)
            if found is not None and found.chunk.chunk_id == chunk_id:
                return found.stored
        raise KeyError(chunk_id)

    def known_vectors(self, title: str, chunk_ids: Sequence[str]) -> dict[str, np.ndarray]:
        """Vectors already stored for these chunks under this title: no need to embed them again."""
        known = {}
        for chunk_id in dict.fromkeys(chunk_ids):
            rows = self._file.rows(
                f"{passages.PLACE} WHERE chunk_id = ? AND title = ? AND length(vector) > 0 LIMIT 1",
                chunk_id,
                title,
            )
            found = passages.place(self._file, rows[0]) if rows else None
            if found is None or (found.chunk.chunk_id, found.title) != (chunk_id, title):
                continue
            if (vector := vector_of(found.vector, self._file.number("dim") or 0)) is not None:
                known[chunk_id] = vector
        return known
