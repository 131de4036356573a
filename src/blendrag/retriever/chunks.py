"""Chunks as they are stored, read by id or document.

Owns the reading. Does not know how they came there, or how one is found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blendrag.chunking import Chunk
from blendrag.retriever import passages
from blendrag.retriever.file import CorpusFile
from blendrag.retriever.passages import StoredChunk


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
        rows = self._file.rows(
            "SELECT text, start, end, tokens, chunk_id FROM passage "
            "JOIN chunk ON chunk.id = passage.chunk "
            "JOIN document ON document.id = passage.document WHERE source = ? ORDER BY start",
            source,
        )
        return [Chunk(*row) for row in rows]

    def text(self, chunk_id: str) -> str:
        """Canonical text of a chunk. Raises :class:`KeyError` where it is not there."""
        rows = self._file.rows("SELECT text FROM chunk WHERE chunk_id = ?", chunk_id)
        if not rows:
            raise KeyError(chunk_id)
        return str(rows[0][0])

    def chunk(self, chunk_id: str) -> StoredChunk:
        """A chunk at the first place it was stored for. Raises :class:`KeyError`."""
        rows = self._file.rows(
            f"{passages.STORED_CHUNK} WHERE chunk_id = ? ORDER BY passage.id LIMIT 1", chunk_id
        )
        if not rows:
            raise KeyError(chunk_id)
        return passages.stored_chunk(rows[0])

    def known_vectors(self, title: str, chunk_ids: Sequence[str]) -> dict[str, np.ndarray]:
        """Vectors already stored for these chunks under this title: no need to embed them again."""
        known = {}
        for chunk_id in dict.fromkeys(chunk_ids):
            rows = self._file.rows(
                "SELECT vector FROM passage JOIN chunk ON chunk.id = passage.chunk "
                "JOIN document ON document.id = passage.document "
                "WHERE chunk_id = ? AND title = ? AND length(vector) > 0 LIMIT 1",
                chunk_id,
                title,
            )
            if rows:
                known[chunk_id] = np.frombuffer(rows[0][0], np.float32)
        return known
