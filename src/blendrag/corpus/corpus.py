"""The corpus."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from blendrag.corpus import database, documents
from blendrag.corpus.database import (
    ANCHOR,
    CHUNK,
    DOCUMENT,
    DROPPED,
    PASSAGE,
    TABLES,
    CorpusFile,
    DamagedRow,
    Table,
    damaged_settings,
)
from blendrag.corpus.documents import EntryTable, StoredChunk
from blendrag.corpus.embedder import same_embedder
from blendrag.corpus.manifest import Manifest
from blendrag.corpus.vectors import VectorSearch, vector_of
from blendrag.errors import CorpusError, InvalidInputError
from blendrag.text.chunking import Chunk
from blendrag.text.readers import Document
from blendrag.text.recognition import HASHES_BYTES, ChunkIndex


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


class Anchors:
    """The index of one corpus's chunks."""

    def __init__(self, file: CorpusFile) -> None:
        self._file = file
        self._index = ChunkIndex(self._text_of)
        self._generation = -1
        self._last = 0

    def refreshed(self) -> ChunkIndex:
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
        self._index.add_hashes([row[2] for row in sound], [row[3] for row in sound])
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
    return len(packed) == HASHES_BYTES and 0 <= int.from_bytes(packed[:8], "little") < 1 << 40


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

    def _places_of(self, source: str) -> list[documents.Place]:
        found = documents.places(self._file, "WHERE source = ? ORDER BY start", source)
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
            f"{documents.PLACE} WHERE chunk_id = ? ORDER BY passage.id LIMIT 16", chunk_id
        )
        for row in rows:
            found = documents.place(self._file, row)
            if found is not None and found.chunk.chunk_id == chunk_id:
                return found.stored
        raise KeyError(chunk_id)

    def known_vectors(self, title: str, chunk_ids: Sequence[str]) -> dict[str, np.ndarray]:
        """Vectors already stored for these chunks under this title: no need to embed them again."""
        known = {}
        for chunk_id in dict.fromkeys(chunk_ids):
            rows = self._file.rows(
                f"{documents.PLACE} WHERE chunk_id = ? AND title = ? AND length(vector) > 0 LIMIT 1",
                chunk_id,
                title,
            )
            found = documents.place(self._file, rows[0]) if rows else None
            if found is None or (found.chunk.chunk_id, found.title) != (chunk_id, title):
                continue
            if (vector := vector_of(found.vector, self._file.number("dim") or 0)) is not None:
                known[chunk_id] = vector
        return known


DIRECTORY = "corpus"


class Corpus(StoredChunks):
    """Made by :meth:`open`. Each change is one transaction: it is there whole or not at all."""

    def __init__(
        self, directory: Path, connection: sqlite3.Connection, read_only: bool = False
    ) -> None:
        super().__init__(CorpusFile(directory, connection, read_only))
        self.dropped = Dropped(self._file)
        self.search = VectorSearch(self._file)
        self._begun: Manifest | None = None
        self._anchors = Anchors(self._file)

    @property
    def directory(self) -> Path:
        return self._file.directory

    @property
    def read_only(self) -> bool:
        return self._file.read_only

    @cached_property
    def entries(self) -> EntryTable:
        """What came by an id rather than by a path."""
        return EntryTable(self._file, self.search, self.require_begun, self._changed)

    @classmethod
    def open(cls, root: Path, create: bool = False, read_only: bool = False) -> Corpus:
        """The corpus of the store at ``root``; with ``create``, a new one where there is none.

        With ``read_only``, or where it cannot be written, nothing is created or changed and every
        method that would change it raises :class:`CorpusError`. Raises :class:`CorpusError` when it
        is absent, not a corpus, or from a newer version.
        """
        directory = Path(root) / DIRECTORY
        exists = os.path.lexists(directory / database.FILE_NAME)
        if not exists and (read_only or not create):
            if Path(root).is_file():
                raise CorpusError(
                    f"store {root} is a file, expected a directory; choose another --store"
                )
            raise CorpusError(
                f"there is no corpus at {directory}; ingest first (blendrag ingest PATH… --store "
                f"{root})"
            )
        if read_only or (exists and not database.can_write(directory)):
            return cls(directory, database.open_database(directory, read_only=True), read_only=True)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise CorpusError(
                f"{directory} cannot be made ({exc.strerror}); give --store a directory that can "
                "be written"
            ) from exc
        corpus = cls(directory, database.open_database(directory, create=create))
        # A backup was brought back: new passages would get ids that the cache has from its future.
        if corpus.search.index.saved_generation() > corpus._file.generation():
            corpus.search.index.drop()
        return corpus

    def close(self) -> None:
        """Writes the vector cache and closes the file. Closing twice is no error."""
        with self._file.lock:
            if not self._file.closed and not self.read_only:
                self.search.index.save()
            self._file.close()

    def __enter__(self) -> Corpus:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- manifest ---------------------------------------------------------------------------

    @property
    def has_manifest(self) -> bool:
        return self._file.meta("manifest") is not None

    @property
    def manifest(self) -> Manifest:
        """Raises :class:`CorpusError` where none was set yet (see :attr:`has_manifest`)."""
        value = self._file.meta("manifest")
        if value is None:
            raise CorpusError(
                f"the corpus at {self.directory} has no manifest, as nothing was ingested; "
                "ingest first (blendrag ingest PATH…)"
            )
        try:
            return Manifest.from_json(value)
        except (TypeError, ValueError, RecursionError) as exc:
            raise damaged_settings("the manifest is none", self._file.path) from exc

    def begin(self, manifest: Manifest) -> None:
        """Sets the manifest unless something is there already, under one that holds then.

        What is put from here on has to be of that one: of two processes that begin one corpus at
        once, the later one's manifest holds, and the other may not mix its own chunks in.
        """
        with self._file.writing():
            if not self.has_manifest or not len(self):
                self._file.set_meta("manifest", manifest.to_json())
            self._begun = self.manifest

    def require_begun(self) -> None:
        """Raises :class:`CorpusError` where another's manifest holds by now. Asked within every put."""
        differences = self.manifest.differences(self._begun) if self._begun is not None else {}
        if differences:
            told = ", ".join(
                f"{name} {theirs!r:.40} instead of {ours!r:.40}"
                for name, (theirs, ours) in differences.items()
            )
            raise CorpusError(
                f"the corpus at {self.directory} was begun by another process at the same time, "
                f"with {told}; repeat the command to go on with that, or choose another --store"
            )

    def set_manifest(self, manifest: Manifest) -> None:
        """Replaces the manifest.

        Raises :class:`CorpusError` when vectors of another embedder are already there.
        """
        with self._file.writing():
            if self.has_manifest and self.search.dim() is not None:
                self._check_embedder(manifest.embedder)
            self._file.set_meta("manifest", manifest.to_json())

    def _check_embedder(self, embedder: str) -> None:
        present = self.manifest.embedder
        if not same_embedder(present, embedder):
            raise CorpusError(
                f"the corpus at {self.directory} was embedded with {present!r}, not {embedder!r}; "
                f"use --embedder {present} or ingest into another --store"
            )

    # ---- documents --------------------------------------------------------------------------

    def sources(self) -> list[str]:
        """Sources of all documents, sorted."""
        rows = self._file.rows(f"SELECT {DOCUMENT.selected} FROM document NOT INDEXED")
        found = [self._file.checked(row, DOCUMENT) for row in rows]
        return sorted(each[0][1] for each in found if each is not None)

    def document_digest(self, source: str) -> str | None:
        """The digest given with the document's last version, None where it is not there."""
        rows = self._file.rows(f"SELECT {DOCUMENT.selected} FROM document WHERE source = ?", source)
        found = self._file.checked(rows[0], DOCUMENT) if rows else None
        return found[0][3] if found is not None and found[0][1] == source else None

    def put_document(
        self, document: Document, digest: str, chunks: Sequence[Chunk], vectors: np.ndarray
    ) -> list[str]:
        """Stores a document in place of its earlier version, in one transaction.

        ``vectors``: float32 [len(chunks), dim], unit length. Returns the ids of chunks that no
        document holds any more. Raises :class:`InvalidInputError` for vectors of another shape,
        :class:`CorpusError` where the corpus is another's by now (see :meth:`begin`).
        """
        if document.source.startswith(database.ENTRY_SOURCE):
            raise InvalidInputError(
                f"source {document.source!r} begins with {database.ENTRY_SOURCE!r}, which names what was "
                "added by an id; expected another path"
            )
        vectors = np.ascontiguousarray(vectors, np.float32)
        with self._file.writing():
            self.require_begun()
            self.search.check(vectors, len(chunks))
            suspects = documents.delete_document(self._file.connection, document.source)
            documents.insert_document(self._file.connection, document, digest, chunks, vectors)
            return self._changed(suspects)

    def remove_source(self, source: str) -> list[str]:
        """Removes one document; ids of chunks that no document holds any more."""
        with self._file.writing():
            return self._changed(documents.delete_document(self._file.connection, source))

    def remove_path(self, path: Path | str) -> list[str]:
        """Removes all documents read from a file, or from files below a directory.

        Returns the ids of chunks that no document holds any more; nothing found is no error (see
        :meth:`sources_of`).
        """
        with self._file.writing():
            suspects: list[int] = []
            for source in self.sources_of(path):
                suspects += documents.delete_document(self._file.connection, source)
            return self._changed(suspects)

    def sources_of(self, path: Path | str) -> list[str]:
        """Sources that :meth:`remove_path` would remove: the file's, or all below the directory."""
        return [source for source in self.sources() if documents.is_of(source, path)]

    def _changed(self, suspects: Sequence[int]) -> list[str]:
        """Ends a change: drops the suspects that no document holds, and lets every reader know."""
        orphans = documents.drop_orphans(self._file.connection, suspects)
        self._file.set_meta("generation", str(self._file.generation() + 1))
        return orphans

    # ---- finding ----------------------------------------------------------------------------

    @property
    def chunk_index(self) -> ChunkIndex:
        """Index of all chunks, loaded on first use and kept up with changes of any process."""
        return self._anchors.refreshed()

    def nearest(self, vector: np.ndarray, k: int) -> list[tuple[StoredChunk, float]]:
        """The k nearest different chunks with their L2 distance, nearest first.

        ``vector``: float32 [dim]. Each chunk comes at the place whose vector is nearest.
        """

        def chunk_of(passage: int) -> tuple[str, StoredChunk] | None:
            found = documents.at(self._file, passage)
            return None if found is None else (found.chunk.chunk_id, found.stored)

        return self.search.nearest(vector, k, chunk_of)


#: Faults described in words; all are counted.
MAX_FAULTS = 1000
#: Faults that SQLite finds which are described.
_MAX_STRUCTURE_FAULTS = 10


@dataclass(frozen=True)
class CorpusCheck:
    """What was found in a corpus, before any repair."""

    rows: int
    damaged: int
    faults: tuple[str, ...]
    """What is damaged; the first :data:`MAX_FAULTS`."""
    repaired: bool

    @property
    def is_good(self) -> bool:
        return not self.damaged


def check_corpus(root: Path, repair: bool = False) -> CorpusCheck:
    """Check the corpus of the store at ``root``; with ``repair``, remove what is damaged.

    Raises :class:`CorpusError` where it cannot be opened.
    """
    with Corpus.open(root, read_only=not repair) as corpus:
        file = corpus._file
        with file.reading():
            rows, damaged, faults = _scan(file)
        if repair and faults:
            with file.writing():
                _repair(corpus, damaged)
        return CorpusCheck(
            rows, len(faults), tuple(faults[:MAX_FAULTS]), repaired=repair and bool(faults)
        )


def _scan(file: CorpusFile) -> tuple[int, list[tuple[Table, Any]], list[str]]:
    """Rows read; table and key of those that are damaged; all faults in words."""
    connection = file.connection
    structure = [
        str(row[0])
        for row in connection.execute(f"PRAGMA integrity_check({_MAX_STRUCTURE_FAULTS})")
    ]
    faults = [f"structure: {fault}" for fault in structure if fault != "ok"]
    rows = 0
    damaged: list[tuple[Table, Any]] = []
    for table in TABLES:
        for row in connection.execute(f"SELECT {table.selected} FROM {table.name} NOT INDEXED"):
            rows += 1
            try:
                table.checked(row)
            except DamagedRow as exc:
                damaged.append((table, row[0]))
                faults.append(f"row {exc} is not what was written")
    for table_name, key, parent, _ in connection.execute("PRAGMA foreign_key_check"):
        faults.append(f"row {table_name} {key}: its {parent} is lost")
    short = connection.execute(
        "SELECT source FROM document WHERE passages != "
        "(SELECT count(*) FROM passage WHERE passage.document = document.id)"
    )
    faults += [f"document {source!r:.80}: some of its passages are lost" for (source,) in short]
    return rows, damaged, faults


def _repair(corpus: Corpus, damaged: list[tuple[Table, Any]]) -> None:
    """Within a transaction."""
    file = corpus._file
    connection: sqlite3.Connection = file.connection
    connection.execute("REINDEX")
    for table, key in damaged:
        name, column = table.name, table.columns[0][0]
        if table is CHUNK:  # a document without one of its chunks is not whole
            connection.execute("DELETE FROM passage WHERE chunk = ?", (key,))
        connection.execute(f"DELETE FROM {name} WHERE {column} = ?", (key,))
    for statement in (
        f"DELETE FROM {PASSAGE.name} WHERE document NOT IN (SELECT id FROM document) "
        "OR chunk NOT IN (SELECT id FROM chunk)",
        f"DELETE FROM {DOCUMENT.name} WHERE passages != "
        "(SELECT count(*) FROM passage WHERE passage.document = document.id)",
        "DELETE FROM entry WHERE document NOT IN (SELECT id FROM document)",
        "DELETE FROM anchor WHERE chunk NOT IN (SELECT id FROM chunk)",
    ):
        connection.execute(statement)
    orphans = connection.execute(
        "SELECT id FROM chunk WHERE id NOT IN (SELECT chunk FROM passage)"
    ).fetchall()
    corpus._changed([row for (row,) in orphans])
    corpus.search.index.drop()
