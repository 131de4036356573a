"""The anchor index of a corpus, in memory and kept up with the file.

Owns when it is read. Does not know how a prompt is searched (:mod:`blendrag.anchors`).
"""

from __future__ import annotations

from blendrag.anchors import AnchorIndex
from blendrag.retriever import database
from blendrag.retriever.file import CorpusFile


class Anchors:
    """The index of one corpus's chunks."""

    def __init__(self, file: CorpusFile) -> None:
        self._file = file
        self._index = AnchorIndex(self._text_of)
        self._generation = -1
        self._last = 0

    def refreshed(self) -> AnchorIndex:
        """The index, loaded on first use and kept up with changes of any process."""
        with self._file.lock:
            if self._generation != self._file.generation():
                with self._file.reading():
                    generation = self._file.generation()
                    self._refresh()
                self._generation = generation
            return self._index

    def _refresh(self) -> None:
        if not database.has_entries(self._file.connection):  # of the first format, and only read
            self._index = AnchorIndex(self._text_of)
            for chunk_id, text in self._file.rows("SELECT chunk_id, text FROM chunk"):
                self._index.add(chunk_id, text)
            return
        rows = self._file.rows(
            "SELECT id, chunk_id, packed FROM anchor WHERE id > ? ORDER BY id", self._last
        )
        if self._last and self._removed(len(rows)):
            present = {row[0] for row in self._file.rows("SELECT chunk_id FROM chunk")}
            for chunk_id in self._index.ids():
                if chunk_id not in present:
                    self._index.discard(chunk_id)
        self._index.add_packed([row[1] for row in rows], [row[2] for row in rows])
        self._last = rows[-1][0] if rows else self._last

    def _removed(self, added: int) -> bool:
        ((count,),) = self._file.rows("SELECT count(*) FROM anchor")
        return int(count) != len(self._index) + added

    def _text_of(self, chunk_id: str) -> str:
        rows = self._file.rows("SELECT text FROM chunk WHERE chunk_id = ?", chunk_id)
        if not rows:
            raise KeyError(chunk_id)
        return str(rows[0][0])
