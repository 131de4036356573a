"""Entries: texts that came by an id, each one chunk and never split.

Owns the statements that add, change, remove and find them, each call in one transaction. In the
tables an entry is a document of one passage, so that everything else finds its chunk as it finds any
other. Does not know embedders, KV or which framework's ids these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from blendrag.corpus import passages
from blendrag.corpus.file import CorpusFile
from blendrag.corpus.passages import StoredChunk
from blendrag.corpus.rows import ENTRY
from blendrag.corpus.search import VectorSearch
from blendrag.corpus.vectors import vector_of
from blendrag.text.chunking import Chunk
from blendrag.text.readers.document import Document

#: Parameters that one statement is given at most.
_BATCH = 500


@dataclass(frozen=True)
class Entry:
    """A text with the id it goes by; ``text`` is given back exactly as it was given.

    ``parent`` names what it was cut out of, ``start`` where it stood there, and ``title`` is embedded
    before it. ``metadata`` holds JSON values.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    parent: str = ""
    title: str = ""
    start: int = 0

    @property
    def source(self) -> str:
        """What a reader is told of where this comes from."""
        named = self.metadata.get("source")
        return named if isinstance(named, str) and named else self.parent or self.id


class NewEntry(NamedTuple):
    """An entry to be stored; ``vector`` is float32 [dim], or [0] where no search shall find it."""

    entry: Entry
    chunk: Chunk
    digest: str
    vector: np.ndarray


class EntryHit(NamedTuple):
    """An entry found, or a chunk of an ingested document in the shape of one."""

    entry: Entry
    vector: np.ndarray


_ENTRY = (
    f"SELECT {', '.join(table.selected for table in (ENTRY, *passages.PLACE_TABLES))} FROM entry "
    "JOIN document ON document.id = entry.document JOIN passage ON passage.document = document.id "
    "JOIN chunk ON chunk.id = passage.chunk"
)


class _Row(NamedTuple):
    """What is stored of an entry, every row of it sound."""

    id: str
    parent: str
    given: str | None
    place: passages.Place

    @property
    def entry(self) -> Entry:
        text = self.place.chunk.text if self.given is None else self.given
        at = self.place
        return Entry(self.id, text, at.metadata, self.parent, at.title, at.chunk.start)


class EntryTable:
    """The entries of one corpus."""

    def __init__(
        self,
        file: CorpusFile,
        search: VectorSearch,
        before_put: Callable[[], None],
        changed: Callable[[Sequence[int]], list[str]],
    ) -> None:
        """``before_put`` may refuse; ``changed`` ends a change, given the rows of chunks that may have
        lost their last place."""
        self._file = file
        self._search = search
        self._before_put = before_put
        self._changed = changed

    def __len__(self) -> int:
        return int(self._file.rows("SELECT count(*) FROM entry")[0][0])

    def ids(self, parent: str | None = None) -> list[str]:
        """In the order in which they were added or last changed."""
        where, given = ("", ()) if parent is None else ("WHERE parent = ?", (parent,))
        rows = self._file.rows(f"SELECT {ENTRY.selected} FROM entry {where}", *given)
        found = [each[0] for row in rows if (each := self._file.checked(row, ENTRY)) is not None]
        return [entry_id for entry_id, *_ in sorted(found, key=lambda values: values[1])]

    def get(self, ids: Sequence[str]) -> dict[str, Entry]:
        """Those of ``ids`` that are there."""
        return {row.id: row.entry for row in self._of(ids)}

    def all(self, parent: str | None = None) -> Iterator[Entry]:
        """In the order of :meth:`ids`; what is removed meanwhile is left out."""
        ids = self.ids(parent)
        for at in range(0, len(ids), _BATCH):
            batch = ids[at : at + _BATCH]
            found = self.get(batch)
            yield from (found[entry_id] for entry_id in batch if entry_id in found)

    def digests(self, ids: Sequence[str]) -> dict[str, str]:
        """The digest given with each entry's last version."""
        return {row.id: row.place.digest for row in self._of(ids)}

    def chunk_texts(self, ids: Sequence[str]) -> dict[str, str]:
        """Canonical text of each entry."""
        return {row.id: row.place.chunk.text for row in self._of(ids)}

    def put(self, entries: Sequence[NewEntry]) -> list[str]:
        """Stores entries in place of those of the same ids, in one transaction.

        Returns the ids of chunks that nothing holds any more. Raises :class:`InvalidInputError` for
        vectors of another length than the corpus's.
        """
        with self._file.writing():
            self._before_put()
            suspects = self._delete([new.entry.id for new in entries])
            for new in entries:
                vector = np.ascontiguousarray(new.vector, np.float32)
                self._search.check(vector[None], 1)
                self._insert(new, vector)
            return self._changed(suspects)

    def _insert(self, new: NewEntry, vector: np.ndarray) -> None:
        entry, connection = new.entry, self._file.connection
        source = passages.entry_source(entry.id, entry.source)
        document = Document(source, entry.text, entry.title, entry.metadata)
        row = passages.insert_document(connection, document, new.digest, [new.chunk], vector[None])
        given = None if entry.text == new.chunk.text else entry.text
        ENTRY.put(connection, entry.id, row, entry.parent, given)

    def remove(self, ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Removes entries: ids of those that were there, and of chunks that nothing holds any more."""
        with self._file.writing():
            there = list(self.digests(list(dict.fromkeys(ids))))
            return there, self._changed(self._delete(there)) if there else []

    def _delete(self, ids: Sequence[str]) -> list[int]:
        """Rows of the chunks that the entries held. Their documents are known by their sources, too,
        so that what is left of a damaged entry goes with it."""
        chunks: list[int] = []
        connection = self._file.connection
        for entry_id in ids:
            rows = connection.execute(
                "SELECT document, chunk FROM passage WHERE document IN "
                "(SELECT document FROM entry WHERE id = ?)",
                (entry_id,),
            ).fetchall()
            chunks += [chunk for _, chunk in rows]
            connection.executemany("DELETE FROM document WHERE id = ?", {row[:1] for row in rows})
            connection.execute("DELETE FROM entry WHERE id = ?", (entry_id,))
        return chunks

    def nearest(
        self, vector: np.ndarray, k: int, where: Callable[[Entry], bool] | None = None
    ) -> list[tuple[EntryHit, float]]:
        """The k nearest entries, and chunks of ingested documents, that ``where`` takes.

        With their L2 distance, nearest first. ``vector``: float32 [dim].
        """

        def accept(passage: int) -> tuple[str, EntryHit] | None:
            hit = self._hit(passage)
            if hit is None or not (where is None or where(hit.entry)):
                return None
            return hit.entry.id, hit

        return self._search.nearest(vector, k, accept)

    def _hit(self, passage: int) -> EntryHit | None:
        found = passages.at(self._file, passage)
        if found is None:
            return None
        vector = vector_of(found.vector, self._file.number("dim") or 0)
        if vector is None:
            self._file.warn_damaged(f"passage {passage}")
            return None
        entry_id = passages.entry_id_of(found.source)
        if entry_id is None:
            return EntryHit(self._ingested(found.stored), vector)
        entry = self.get([entry_id]).get(entry_id)
        return None if entry is None else EntryHit(entry, vector)

    def _ingested(self, chunk: StoredChunk) -> Entry:
        """A chunk of a document, as an entry: equal chunks are one."""
        place = {
            "source": chunk.source,
            "title": chunk.title,
            "start": chunk.start,
            "end": chunk.end,
            "chunk_id": chunk.chunk_id,
        }
        metadata = {**chunk.metadata, **place}
        return Entry(chunk.chunk_id, chunk.text, metadata, chunk.source, chunk.title, chunk.start)

    def _of(self, ids: Sequence[str]) -> list[_Row]:
        """Those of ``ids`` that are there and sound."""
        rows: list[_Row] = []
        for at in range(0, len(ids), _BATCH):
            batch = ids[at : at + _BATCH]
            marks = ", ".join("?" * len(batch))
            for row in self._file.rows(f"{_ENTRY} WHERE entry.id IN ({marks})", *batch):
                entry = self._file.checked(row, ENTRY)
                place = passages.place(self._file, row[ENTRY.width :])
                if entry is not None and place is not None:
                    entry_id, _, parent, given = entry[0]
                    rows.append(_Row(entry_id, parent, given, place))
        return rows
