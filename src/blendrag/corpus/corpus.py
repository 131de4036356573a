"""The corpus: documents, their chunks' texts, anchors and vectors, kept beside the KV store.

Owns ``<store root>/corpus/``: what was ingested, from where, with which settings, and which chunks
no document holds any more. Does not know how a text becomes a vector or a KV. One SQLite file is
the truth (:mod:`blendrag.corpus.database`); several processes may use it at once, and several
threads may use one :class:`Corpus`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType

import numpy as np

from blendrag.corpus import database, passages
from blendrag.corpus.chunks import StoredChunks
from blendrag.corpus.database_errors import damaged_settings
from blendrag.corpus.dropped import Dropped
from blendrag.corpus.embedder import same_embedder
from blendrag.corpus.entries import EntryTable
from blendrag.corpus.file import CorpusFile
from blendrag.corpus.manifest import Manifest
from blendrag.corpus.passages import StoredChunk
from blendrag.corpus.recognition import Anchors
from blendrag.corpus.rows import DOCUMENT
from blendrag.corpus.search import VectorSearch
from blendrag.errors import CorpusError, InvalidInputError
from blendrag.text.chunking import Chunk
from blendrag.text.readers.document import Document
from blendrag.text.recognition.index import AnchorIndex

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
        if document.source.startswith(database.ENTRY):
            raise InvalidInputError(
                f"source {document.source!r} begins with {database.ENTRY!r}, which names what was "
                "added by an id; expected another path"
            )
        vectors = np.ascontiguousarray(vectors, np.float32)
        with self._file.writing():
            self.require_begun()
            self.search.check(vectors, len(chunks))
            suspects = passages.delete_document(self._file.connection, document.source)
            passages.insert_document(self._file.connection, document, digest, chunks, vectors)
            return self._changed(suspects)

    def remove_source(self, source: str) -> list[str]:
        """Removes one document; ids of chunks that no document holds any more."""
        with self._file.writing():
            return self._changed(passages.delete_document(self._file.connection, source))

    def remove_path(self, path: Path | str) -> list[str]:
        """Removes all documents read from a file, or from files below a directory.

        Returns the ids of chunks that no document holds any more; nothing found is no error (see
        :meth:`sources_of`).
        """
        with self._file.writing():
            suspects: list[int] = []
            for source in self.sources_of(path):
                suspects += passages.delete_document(self._file.connection, source)
            return self._changed(suspects)

    def sources_of(self, path: Path | str) -> list[str]:
        """Sources that :meth:`remove_path` would remove: the file's, or all below the directory."""
        return [source for source in self.sources() if passages.is_of(source, path)]

    def _changed(self, suspects: Sequence[int]) -> list[str]:
        """Ends a change: drops the suspects that no document holds, and lets every reader know."""
        orphans = passages.drop_orphans(self._file.connection, suspects)
        self._file.set_meta("generation", str(self._file.generation() + 1))
        return orphans

    # ---- finding ----------------------------------------------------------------------------

    @property
    def anchors(self) -> AnchorIndex:
        """Index of all chunks, loaded on first use and kept up with changes of any process."""
        return self._anchors.refreshed()

    def nearest(self, vector: np.ndarray, k: int) -> list[tuple[StoredChunk, float]]:
        """The k nearest different chunks with their L2 distance, nearest first.

        ``vector``: float32 [dim]. Each chunk comes at the place whose vector is nearest.
        """

        def chunk_of(passage: int) -> tuple[str, StoredChunk] | None:
            found = passages.at(self._file, passage)
            return None if found is None else (found.chunk.chunk_id, found.stored)

        return self.search.nearest(vector, k, chunk_of)
