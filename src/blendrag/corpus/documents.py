"""Rows of documents, chunks and entries."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blendrag.corpus.database import (
    ANCHOR,
    CHUNK,
    DOCUMENT,
    DROPPED,
    ENTRY,
    ENTRY_SOURCE,
    PASSAGE,
    CorpusFile,
    DamagedRow,
)
from blendrag.corpus.vectors import VectorSearch, vector_of
from blendrag.text.chunking import Chunk
from blendrag.text.readers import Document, MetadataValue
from blendrag.text.recognition import chunk_hashes


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
    return ENTRY_SOURCE + json.dumps([entry_id, shown])


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
    if not source.startswith(ENTRY_SOURCE):
        return None
    try:
        entry_id, shown = json.loads(source[len(ENTRY_SOURCE) :])
    except (ValueError, TypeError, RecursionError):
        return None
    return str(entry_id), str(shown)


def is_of(source: str, path: Path | str) -> bool:
    """Whether a document was read from that file, or from one below that directory."""
    if source.startswith(ENTRY_SOURCE):
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
        ANCHOR.add(connection, row, chunk.chunk_id, chunk_hashes(chunk.text))
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
    f"SELECT {', '.join(table.selected for table in (ENTRY, *PLACE_TABLES))} FROM entry "
    "JOIN document ON document.id = entry.document JOIN passage ON passage.document = document.id "
    "JOIN chunk ON chunk.id = passage.chunk"
)


class _Row(NamedTuple):
    """What is stored of an entry, every row of it sound."""

    id: str
    parent: str
    given: str | None
    place: Place

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
        source = entry_source(entry.id, entry.source)
        document = Document(source, entry.text, entry.title, entry.metadata)
        row = insert_document(connection, document, new.digest, [new.chunk], vector[None])
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
        found = at(self._file, passage)
        if found is None:
            return None
        vector = vector_of(found.vector, self._file.number("dim") or 0)
        if vector is None:
            self._file.warn_damaged(f"passage {passage}")
            return None
        entry_id = entry_id_of(found.source)
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
                found = place(self._file, row[ENTRY.width :])
                if entry is not None and found is not None:
                    entry_id, _, parent, given = entry[0]
                    rows.append(_Row(entry_id, parent, given, found))
        return rows
