"""Documents, chunks and entries as rows: the statements that store, remove and read them.

An entry is a text added by id: a document with one chunk that is never split, so that search finds it like
any other chunk. Functions that change rows run in the caller's transaction.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from pydantic import ConfigDict

from blendrag.corpus.database import (
    BUSY_TIMEOUT_S,
    CHUNK,
    DOCUMENT,
    DROPPED,
    ENTRY,
    ENTRY_SOURCE,
    HASHES,
    PASSAGE,
    CorpusFile,
    DamagedRow,
    entry_of,
)
from blendrag.corpus.full_text import FullTextIndex
from blendrag.corpus.vectors import VectorIndex, vector_of
from blendrag.errors import CorpusError
from blendrag.store.durable import lock_file, named_errors
from blendrag.text.chunking import Chunk
from blendrag.text.names import page_label
from blendrag.text.readers import PAGE_STARTS, Document, page_at
from blendrag.text.recognition import chunk_hashes

#: Parent of the entries that were learned from prompts. Their ids are those of their chunks, which name the
#: scope (:func:`blendrag.text.chunking.learned_id`).
LEARNED = "learned from prompts"
#: Condition on rows of ``document``, with :data:`LEARNED` as its parameter.
NOT_LEARNED = "id NOT IN (SELECT document FROM entry WHERE parent = ?)"
#: Parameters of one statement at most.
_BATCH = 500


# -- chunks of documents ----------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredChunk:
    """A chunk at one place of one document. Its text ends with ``document.text[start:end]``."""

    chunk_id: str
    text: str
    tokens: int
    title: str
    entry_id: str | None
    source: str
    start: int
    end: int
    metadata: Mapping[str, Any]
    page: int | None
    """The page of a PDF that it begins on, from 1."""
    last_page: int | None
    """The page that it ends on."""
    document: str
    """The document's source as stored; differs from ``source`` for an entry."""
    digest: str
    """Digest of the document, as given to :meth:`Corpus.put_document`."""
    vector: bytes

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.text, self.start, self.end, self.tokens, self.chunk_id)


_PLACE_TABLES = (PASSAGE, CHUNK, DOCUMENT)
_PLACES = "JOIN chunk ON chunk.id = passage.chunk JOIN document ON document.id = passage.document"


def stored_chunks(
    file: CorpusFile, condition: str, *parameters: str | float
) -> Iterator[StoredChunk]:
    """Chunks at the places that meet a condition; damaged rows are left out with a warning."""
    for place in file.sound_rows(_PLACE_TABLES, f"{_PLACES} {condition}", *parameters):
        yield _stored_chunk(*place)


def chunks_at(file: CorpusFile, passages: Sequence[int]) -> dict[int, StoredChunk]:
    """The chunks at passages that an index knows; damaged ones are left out with a warning."""
    condition = f"{_PLACES} WHERE passage.id IN (SELECT value FROM json_each(?))"
    rows = file.sound_rows(_PLACE_TABLES, condition, json.dumps(passages))
    found = {place[0][0]: _stored_chunk(*place) for place in rows}
    for passage in passages:
        if passage not in found:
            file.warn_damaged(f"passage {passage}")
    return found


def chunk_at(file: CorpusFile, passage: int) -> StoredChunk | None:
    """The chunk at a passage, as :func:`chunks_at`."""
    return chunks_at(file, [passage]).get(passage)


def _stored_chunk(
    passage: tuple[Any, ...], chunk: tuple[Any, ...], of: tuple[Any, ...]
) -> StoredChunk:
    *_, start, end, vector = passage
    _, chunk_id, text, tokens = chunk
    _, document, title, digest, metadata, _ = of
    entry_id, source = entry_of(document)
    pages = metadata.pop(PAGE_STARTS, None)
    page, last_page = (page_at(pages, place) for place in (start, max(start, end - 1)))
    return StoredChunk(
        chunk_id, text, tokens, title, entry_id, source, start, end, metadata, page, last_page,
        document, digest, vector,
    )  # fmt: skip


def insert_document(
    file: CorpusFile,
    document: Document,
    digest: str,
    chunks: Sequence[Chunk],
    vectors: Iterable[np.ndarray],
) -> int:
    """Add a new document and return its row id. ``vectors``: float32 [dim] for each chunk, or [0]."""
    connection, full_text = file.connection, FullTextIndex(file)
    metadata = json.dumps(dict(document.metadata))
    document_row = DOCUMENT.add(
        connection, document.source, document.title, digest, metadata, len(chunks)
    )
    for chunk, vector in zip(chunks, vectors, strict=True):
        chunk_row = _insert_chunk(connection, chunk)
        passage = PASSAGE.add(
            connection, document_row, chunk_row, chunk.start, chunk.end, vector.tobytes()
        )
        if vector.size:
            full_text.add(passage, document.title, document.source, chunk.text)
    return document_row


def _insert_chunk(connection: sqlite3.Connection, chunk: Chunk) -> int:
    """Row id of the chunk, which is added if it is new and mended if it is damaged."""
    found = connection.execute(
        f"SELECT {CHUNK.selected} FROM chunk WHERE chunk_id = ?", (chunk.chunk_id,)
    ).fetchone()
    if found is None:
        row = CHUNK.add(connection, chunk.chunk_id, chunk.text, chunk.tokens)
        HASHES.add(connection, row, chunk.chunk_id, chunk_hashes(chunk.text))
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


def delete_documents(file: CorpusFile, which: str, value: str) -> list[int]:
    """Remove documents with their passages; row ids of the chunks that they held.

    ``which`` selects the documents' row ids by ``value``.
    """
    connection, full_text = file.connection, FullTextIndex(file)
    rows = connection.execute(
        f"SELECT id, chunk FROM passage WHERE document IN ({which})", (value,)
    ).fetchall()
    for passage, _ in rows:
        full_text.remove(passage)
    connection.execute(f"DELETE FROM document WHERE id IN ({which})", (value,))
    return [*dict.fromkeys(chunk for _, chunk in rows)]


def end_change(file: CorpusFile, suspects: Sequence[int]) -> list[str]:
    """End every change: remove the suspects without a passage and return their ids.

    Their texts are recorded as dropped, as their KV is still stored. Readers see that passages changed.
    """
    orphans: list[str] = []
    for row in dict.fromkeys(suspects):
        deleted = file.connection.execute(
            "DELETE FROM chunk WHERE id = ? AND NOT EXISTS "
            f"(SELECT 1 FROM passage WHERE chunk = ?) RETURNING {CHUNK.selected}",
            (row, row),
        ).fetchall()
        for each in deleted:
            with suppress(DamagedRow):  # KV of a text that is lost stays until it is evicted
                _, chunk_id, text, _ = CHUNK.checked(each)
                DROPPED.put(file.connection, chunk_id, text, 0.0)
                orphans.append(chunk_id)
    FullTextIndex(file).end_change()
    file.set_meta("generation", str(file.generation() + 1))
    return orphans


# -- whole documents --------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacedChunk(Chunk):
    """A chunk of a document; ``vector`` is empty if search must not find it."""

    __pydantic_config__: ClassVar = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    vector: bytes


@dataclass(frozen=True)
class Record:
    """A document or an entry with everything that is stored of it."""

    source: str
    title: str
    digest: str
    metadata: dict[str, Any]
    entry: tuple[str, str, str | None] | None
    """Id, parent and the text as given, of an entry."""
    places: tuple[PlacedChunk, ...]


def record_of(file: CorpusFile, source: str) -> Record | None:
    """The document with that stored source; ``None`` if there is none, or any of its rows is damaged."""
    for (row,) in file.sound_rows((DOCUMENT,), "WHERE source = ?", source):
        number, _, title, digest, metadata, passages = row
        entry = None
        for (found,) in file.sound_rows((ENTRY,), "WHERE document = ?", number):
            entry = found[0], found[2], found[3]
        places = tuple(
            PlacedChunk(**vars(each.chunk), vector=each.vector)
            for each in stored_chunks(file, "WHERE document.id = ? ORDER BY passage.id", number)
        )
        if len(places) == passages and (entry is not None) == source.startswith(ENTRY_SOURCE):
            return Record(source, title, digest, metadata, entry, places)
    return None


def insert_record(
    file: CorpusFile, record: Record, check: Callable[[np.ndarray, int], None]
) -> None:
    """Add what :func:`record_of` gave. ``check`` refuses vectors that do not fit the corpus."""
    vectors = [np.frombuffer(place.vector, np.float32) for place in record.places]
    for vector in vectors:
        check(vector[None], 1)
    document = Document(record.source, "", record.title, record.metadata)
    row = insert_document(file, document, record.digest, record.places, vectors)
    if record.entry is not None:
        entry_id, parent, given = record.entry
        ENTRY.put(file.connection, entry_id, row, parent, given)


#: Chunks of other documents than entries of one parent.
_OTHERS = "(SELECT chunk FROM passage WHERE document NOT IN (SELECT document FROM entry WHERE parent = ?))"


def published_texts(file: CorpusFile) -> Iterator[str]:
    """Texts of all chunks but those that were only learned from prompts, each once."""
    chunks = file.sound_rows((CHUNK,), f"WHERE id IN {_OTHERS}", LEARNED)
    return (text for ((_, _, text, _),) in chunks)


#: Why a text is recorded as dropped: no document holds it any more, or not yet. Not a time: clocks are wrong.
REMOVED, ADDING = 0.0, 1.0


class DroppedTexts:
    """Records of texts that no document holds although their KV may be stored."""

    def __init__(self, file: CorpusFile) -> None:
        self._file = file

    @contextmanager
    def adding(self) -> Iterator[None]:
        """While this is open, in any process, additions that have not ended are not dropped.

        The kernel ends it with the process. Raises :class:`CorpusError` and :class:`StoreError`.
        """
        with self._lock_file() as fd:
            try:
                lock_file(fd, fcntl.LOCK_SH, BUSY_TIMEOUT_S)
            except OSError as exc:
                raise CorpusError(
                    f"the corpus at {self._file.directory} cannot be locked ({exc.strerror}), expected no "
                    "process that is stopped while it removes documents; end it, then try again"
                ) from exc
            yield

    def texts(self) -> dict[str, str]:
        """Ids and texts of removed chunks, and of additions that will not end.

        Which those are is not known while another addition runs.
        """
        with self._lock_file() as fd, suppress(OSError):
            lock_file(fd, fcntl.LOCK_EX, 0.0)
            begun = [row for (row,) in self._file.sound_rows((DROPPED,), "WHERE since > 0")]
            if begun:
                with self._file.writing() as connection:
                    for chunk_id, text, _ in begun:
                        DROPPED.put(connection, chunk_id, text, REMOVED)
        return {chunk_id: text for ((chunk_id, text, _),) in self._removed("")}

    def is_removed(self, chunk_id: str) -> bool:
        """Whether it is still recorded, and no addition of it has begun."""
        return any(self._removed("AND chunk_id = ?", chunk_id))

    def _removed(self, condition: str, *parameters: str) -> Iterator[Any]:
        return self._file.sound_rows(
            (DROPPED,),
            "WHERE since = 0 AND NOT EXISTS "
            f"(SELECT 1 FROM chunk WHERE chunk.chunk_id = dropped.chunk_id) {condition}",
            *parameters,
        )

    @contextmanager
    def _lock_file(self) -> Iterator[int]:
        path = self._file.directory / "adding.lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with named_errors(f"opening {path}"):
            fd = os.open(path, flags, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)

    def note(self, chunks: Sequence[Chunk], since: float) -> None:
        """Record texts as :data:`REMOVED`, or as :data:`ADDING`, before KV is stored for them."""
        with self._file.writing() as connection:
            for chunk in chunks:
                known = "SELECT 1 FROM chunk WHERE chunk_id = ?"
                if not connection.execute(known, (chunk.chunk_id,)).fetchone():
                    DROPPED.put(connection, chunk.chunk_id, chunk.text, since)

    def forget(self, chunk_ids: Sequence[str]) -> None:
        """Delete records of chunks whose KV is gone."""
        with self._file.writing() as connection:
            connection.executemany(
                "DELETE FROM dropped WHERE chunk_id = ? AND since = 0",
                [(chunk_id,) for chunk_id in chunk_ids],
            )


# -- entries ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A text with the caller's id; ``text`` is returned exactly as given.

    ``parent`` names the document it was cut from, at character ``start``; ``title`` is embedded before the
    text. ``metadata`` holds JSON values.
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    parent: str = ""
    title: str = ""
    start: int = 0

    @property
    def source(self) -> str:
        """The source shown to readers."""
        named = self.metadata.get("source")
        return named if isinstance(named, str) and named else self.parent or self.id


class NewEntry(NamedTuple):
    """An entry to be stored; ``vector`` is float32 [dim], or [0] if search must not find it."""

    entry: Entry
    chunk: Chunk
    digest: str
    vector: np.ndarray


@dataclass(frozen=True)
class Hit:
    """An entry found by search, or a chunk of an ingested document in the form of one.

    ``distance`` is L2 between unit vectors, in [0, 2]; ``vector`` is the entry's, float32 [dim].
    """

    entry: Entry
    distance: float
    vector: np.ndarray

    @property
    def similarity(self) -> float:
        """Cosine of the angle between the vectors, in [-1, 1]."""
        return 1.0 - self.distance**2 / 2.0


_ENTRIES = (
    "JOIN document ON document.id = entry.document JOIN passage ON passage.document = document.id "
    "JOIN chunk ON chunk.id = passage.chunk"
)


class EntryTable:
    def __init__(
        self, file: CorpusFile, vectors: VectorIndex, before_put: Callable[[], None]
    ) -> None:
        """``before_put`` runs in the transaction and may refuse."""
        self._file = file
        self._vectors = vectors
        self._before_put = before_put

    def __len__(self) -> int:
        """Without those that were learned from prompts."""
        return int(self._file.rows("SELECT count(*) FROM entry WHERE parent != ?", LEARNED)[0][0])

    def ids(self, parent: str | None = None) -> list[str]:
        """Ids in the order in which the entries were added or last changed: of this parent, or all but those
        that were learned from prompts."""
        where, given = ("parent != ?", LEARNED) if parent is None else ("parent = ?", parent)
        found = self._file.sound_rows((ENTRY,), f"WHERE {where} ORDER BY document", given)
        return [entry[0] for (entry,) in found]

    def get(self, ids: Sequence[str]) -> dict[str, Entry]:
        """The entries with these ids; unknown ids are left out."""
        return {entry.id: entry for entry, _ in self.read(ids)}

    def all(self, parent: str | None = None, allowed: np.ndarray | None = None) -> Iterator[Entry]:
        """Entries in the order of :meth:`ids`, without those removed meanwhile; ``allowed``: only those with
        one of these passages."""
        ids = self.ids(parent)
        if allowed is not None:
            passages = set(allowed.tolist())
            rows = self._file.rows(
                "SELECT entry.id, passage.id FROM entry JOIN passage ON passage.document = entry.document"
            )
            within = {entry for entry, passage in rows if passage in passages}
            ids = [entry for entry in ids if entry in within]
        for at in range(0, len(ids), _BATCH):
            batch = ids[at : at + _BATCH]
            found = self.get(batch)
            yield from (found[entry_id] for entry_id in batch if entry_id in found)

    def put(self, entries: Sequence[NewEntry]) -> list[str]:
        """Store entries in place of those with the same ids, in one transaction.

        Returns the ids of chunks that are no longer used. Raises :class:`InvalidInputError` for vectors of
        another length than the corpus's.
        """
        with self._file.writing() as connection:
            self._before_put()
            suspects = self._delete([new.entry.id for new in entries])
            for new in entries:
                entry, vector = new.entry, np.ascontiguousarray(new.vector, np.float32)[None]
                self._vectors.check(vector, 1)
                source = ENTRY_SOURCE + json.dumps([entry.id, entry.source])
                document = Document(source, entry.text, entry.title, entry.metadata)
                row = insert_document(self._file, document, new.digest, [new.chunk], vector)
                given = None if entry.text == new.chunk.text else entry.text
                ENTRY.put(connection, entry.id, row, entry.parent, given)
            return end_change(self._file, suspects)

    def remove(self, ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Remove entries: ids of those that existed, and of chunks that are no longer used."""
        with self._file.writing():
            known = list(self.get(list(dict.fromkeys(ids))))
            return known, end_change(self._file, self._delete(known)) if known else []

    def _delete(self, ids: Sequence[str]) -> list[int]:
        """Delete rows of entries, damaged ones included; row ids of the chunks that they held."""
        chunks: list[int] = []
        connection, which = self._file.connection, "SELECT document FROM entry WHERE id = ?"
        for entry_id in ids:
            chunks += delete_documents(self._file, which, entry_id)
            connection.execute("DELETE FROM entry WHERE id = ?", (entry_id,))
        return chunks

    def nearest(
        self,
        vector: np.ndarray,
        k: int,
        where: Callable[[Entry], bool] | None = None,
        allowed: np.ndarray | None = None,
    ) -> list[Hit]:
        """The k nearest entries and chunks of ingested documents that ``where`` accepts, nearest first.

        ``vector``: float32 [dim]. ``allowed``: ids of passages, int64 [n]; others are not found.
        """

        def accept(passage: int) -> tuple[str, tuple[Entry, np.ndarray]] | None:
            hit = self._hit(passage)
            return (hit[0].id, hit) if hit and (where is None or where(hit[0])) else None

        found = self._vectors.nearest(vector, k, accept, allowed)
        return [Hit(entry, distance, of_entry) for (entry, of_entry), distance in found]

    def _hit(self, passage: int) -> tuple[Entry, np.ndarray] | None:
        found = chunk_at(self._file, passage)
        if found is None:
            return None
        vector = vector_of(found.vector, self._file.number("dim") or 0)
        if vector is None:
            self._file.warn_damaged(f"passage {passage}")
            return None
        if found.entry_id is not None:
            entry = self.get([found.entry_id]).get(found.entry_id)
            return None if entry is None else (entry, vector)
        place = ("source", "title", "start", "end", "chunk_id")
        metadata = {**found.metadata, **{name: getattr(found, name) for name in place}}
        if found.page is not None:
            # as both frameworks name it
            metadata["page_label"] = page_label(found.page, found.last_page)
        # Equal chunks are one entry.
        places = found.source, found.title, found.start
        return Entry(found.chunk_id, found.text, metadata, *places), vector

    def read(self, ids: Sequence[str]) -> Iterator[tuple[Entry, StoredChunk]]:
        """The undamaged entries with these ids, and their chunks."""
        for at in range(0, len(ids), _BATCH):
            batch = ids[at : at + _BATCH]
            marks = ", ".join("?" * len(batch))
            condition = f"{_ENTRIES} WHERE entry.id IN ({marks})"
            for entry, *place in self._file.sound_rows((ENTRY, *_PLACE_TABLES), condition, *batch):
                (entry_id, _, parent, given), stored = entry, _stored_chunk(*place)
                text = stored.text if given is None else given
                attributes = stored.metadata, parent, stored.title, stored.start
                yield Entry(entry_id, text, *attributes), stored
