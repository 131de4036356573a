"""The anchor index of a corpus, in memory and kept up with the file.

Owns when it is read. Does not know how a prompt is searched (:mod:`blendrag.text.recognition`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blendrag.corpus.file import CorpusFile
from blendrag.corpus.rows import ANCHOR, CHUNK, DamagedRow
from blendrag.text.recognition.index import AnchorIndex
from blendrag.text.recognition.rows import PACKED_BYTES


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
        rows = self._file.rows(
            f"SELECT {ANCHOR.selected} FROM anchor WHERE id > ? ORDER BY id", self._last
        )
        sound = [row[:4] for row in rows if _is_sound(row)]
        if self._last and self._removed(len(rows)):
            present = {row[0] for row in self._file.rows("SELECT chunk_id FROM chunk")}
            for chunk_id in self._index.ids():
                if chunk_id not in present:
                    self._index.discard(chunk_id)
        self._index.add_packed([row[2] for row in sound], [row[3] for row in sound])
        if len(sound) < len(rows):
            self._add_from_texts()
        self._last = rows[-1][0] if rows else self._last

    def _add_from_texts(self) -> None:
        """Chunks whose anchors are damaged: what they say can be made from their texts."""
        for row in self._file.rows(f"SELECT {CHUNK.selected} FROM chunk NOT INDEXED"):
            if row[1] not in self._index and (found := self._file.checked(row, CHUNK)) is not None:
                self._index.add(found[0][1], found[0][2])

    def _removed(self, added: int) -> bool:
        ((count,),) = self._file.rows("SELECT count(*) FROM anchor")
        return int(count) != len(self._index) + added

    def _text_of(self, chunk_id: str) -> str:
        rows = self._file.rows(f"SELECT {CHUNK.selected} FROM chunk WHERE chunk_id = ?", chunk_id)
        found = self._file.checked(rows[0], CHUNK) if rows else None
        if found is None or found[0][1] != chunk_id:
            raise KeyError(chunk_id)
        return str(found[0][2])


def _is_sound(row: Sequence[Any]) -> bool:
    try:
        *_, packed = ANCHOR.checked(row)
    except DamagedRow:
        return False
    return len(packed) == PACKED_BYTES and 0 <= int.from_bytes(packed[:8], "little") < 1 << 40
