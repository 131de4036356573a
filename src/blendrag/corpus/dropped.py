"""Texts that no document holds, though their KV may be stored.

Owns the notes of them: left in the transaction that removed a text, or before KV is stored for one that
is yet to be added, and kept until that KV is known to be gone. Does not know KV.
"""

from __future__ import annotations

from collections.abc import Sequence

from blendrag.corpus.file import CorpusFile
from blendrag.corpus.rows import DROPPED
from blendrag.text.chunking import Chunk


class Dropped:
    """The notes of one corpus."""

    def __init__(self, file: CorpusFile) -> None:
        self._file = file

    def texts(self, before: float = 0.0) -> dict[str, str]:
        """Ids and texts of chunks that no document holds, though their KV may be stored.

        They were removed, or an addition that began ``before`` (Unix time) never ended.
        """
        rows = self._file.rows(
            f"SELECT {DROPPED.selected} FROM dropped WHERE since <= ? AND NOT EXISTS "
            "(SELECT 1 FROM chunk WHERE chunk.chunk_id = dropped.chunk_id)",
            before,
        )
        found = [self._file.checked(row, DROPPED) for row in rows]
        return {each[0][0]: each[0][1] for each in found if each is not None}

    def note(self, chunks: Sequence[Chunk], now: float) -> None:
        """Before KV is stored for chunks that may never be: they may have to be dropped."""
        with self._file.writing():
            for chunk in chunks:
                known = "SELECT 1 FROM chunk WHERE chunk_id = ?"
                if not self._file.connection.execute(known, (chunk.chunk_id,)).fetchone():
                    DROPPED.put(self._file.connection, chunk.chunk_id, chunk.text, float(now))

    def forget(self, chunk_ids: Sequence[str]) -> None:
        """Their KV is gone."""
        with self._file.writing():
            self._file.connection.executemany(
                "DELETE FROM dropped WHERE chunk_id = ?", [(chunk_id,) for chunk_id in chunk_ids]
            )
