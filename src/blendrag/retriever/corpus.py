"""The corpus: documents, their chunks' texts, anchors and vectors, kept beside the KV store.

Owns ``<store root>/corpus/``: what was ingested, from where, with which settings, and which chunks
no document holds any more. Does not know how a text becomes a vector or a KV. One SQLite file is
the truth (:mod:`blendrag.retriever.database`); several processes may use it at once, and several
threads may use one :class:`Corpus`.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np

from blendrag.anchors import AnchorIndex, AnchorRow
from blendrag.chunking import Chunk
from blendrag.errors import CorpusError, InvalidInputError
from blendrag.identity import NATIVE_ENCODING
from blendrag.readers import Document
from blendrag.retriever import database, passages
from blendrag.retriever.embedder import same_embedder
from blendrag.retriever.passages import StoredChunk
from blendrag.retriever.vectors import FILE_NAME as VECTORS_FILE
from blendrag.retriever.vectors import VectorIndex

DIRECTORY = "corpus"


@dataclass(frozen=True)
class Manifest:
    """What a corpus was ingested with. ``prefix_ids`` stand before every chunk when encoded."""

    model: str
    model_signature: str
    tokenizer_fingerprint: str
    namespace: str
    chunk_tokens: int
    prefix_ids: tuple[int, ...]
    prefix_text: str
    embedder: str
    encoding: str = NATIVE_ENCODING
    """How the chunks' KV is stored."""


class Corpus:
    """Made by :meth:`open`. Each change is one transaction: it is there whole or not at all."""

    def __init__(
        self, directory: Path, connection: sqlite3.Connection, read_only: bool = False
    ) -> None:
        self.directory = directory
        self.read_only = read_only
        self._path = directory / database.FILE_NAME
        self._connection = connection
        self._lock = threading.RLock()
        self._vectors = VectorIndex(directory / VECTORS_FILE)
        self._anchors: AnchorIndex | None = None
        self._anchors_generation = -1
        self._closed = False

    @classmethod
    def open(cls, root: Path, create: bool = False, read_only: bool = False) -> Corpus:
        """The corpus of the store at ``root``; with ``create``, a new one where there is none.

        With ``read_only``, or where it cannot be written, nothing is created or changed and every
        method that would change it raises :class:`CorpusError`. Raises :class:`CorpusError` when it
        is absent, not a corpus, or from a newer version.
        """
        directory = Path(root) / DIRECTORY
        exists = (directory / database.FILE_NAME).is_file()
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
        corpus = cls(directory, database.open_database(directory))
        # A backup was brought back: new passages would get ids that the cache has from its future.
        if corpus._vectors.saved_generation() > corpus._generation():
            corpus._vectors.drop()
        return corpus

    def close(self) -> None:
        """Writes the vector cache and closes the file. Closing twice is no error."""
        with self._lock:
            if not self._closed:
                if not self.read_only:
                    self._vectors.save()
                self._connection.close()
                self._closed = True

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
        return self._meta("manifest") is not None

    @property
    def manifest(self) -> Manifest:
        """Raises :class:`CorpusError` where none was set yet (see :attr:`has_manifest`)."""
        value = self._meta("manifest")
        if value is None:
            raise CorpusError(
                f"the corpus at {self.directory} has no manifest, as nothing was ingested; "
                "ingest first (blendrag ingest PATH…)"
            )
        fields = json.loads(value)
        return replace(Manifest(**fields), prefix_ids=tuple(fields["prefix_ids"]))

    def set_manifest(self, manifest: Manifest) -> None:
        """Replaces the manifest.

        Raises :class:`CorpusError` when vectors of another embedder are already there.
        """
        with self._writing():
            if self.has_manifest and len(self):
                self._check_embedder(manifest.embedder)
            self._set_meta("manifest", json.dumps(asdict(manifest)))

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
        return [row[0] for row in self._rows("SELECT source FROM document ORDER BY source")]

    def document_digest(self, source: str) -> str | None:
        """The digest given with the document's last version, None where it is not there."""
        rows = self._rows("SELECT digest FROM document WHERE source = ?", source)
        return rows[0][0] if rows else None

    def put_document(
        self, document: Document, digest: str, chunks: Sequence[Chunk], vectors: np.ndarray
    ) -> list[str]:
        """Stores a document in place of its earlier version, in one transaction.

        ``vectors``: float32 [len(chunks), dim], unit length. Returns the ids of chunks that no
        document holds any more. Raises :class:`InvalidInputError` for vectors of another shape.
        """
        vectors = np.ascontiguousarray(vectors, np.float32)
        with self._writing():
            self._check_vectors(vectors, len(chunks))
            suspects = passages.delete_document(self._connection, document.source)
            passages.insert_document(self._connection, document, digest, chunks, vectors)
            return self._changed(suspects)

    def remove_source(self, source: str) -> list[str]:
        """Removes one document; ids of chunks that no document holds any more."""
        with self._writing():
            return self._changed(passages.delete_document(self._connection, source))

    def remove_path(self, path: Path | str) -> list[str]:
        """Removes all documents read from a file, or from files below a directory.

        Returns the ids of chunks that no document holds any more; nothing found is no error (see
        :meth:`sources_of`).
        """
        with self._writing():
            suspects: list[int] = []
            for source in self.sources_of(path):
                suspects += passages.delete_document(self._connection, source)
            return self._changed(suspects)

    def sources_of(self, path: Path | str) -> list[str]:
        """Sources that :meth:`remove_path` would remove: the file's, or all below the directory."""
        name = Path(path).as_posix()
        below = "" if name == "." else name.rstrip("/") + "/"
        return [
            source
            for source in self.sources()
            if source == name
            or source.startswith(name + "#")
            or (source.startswith(below) and not (below == "" and source.startswith(("/", "../"))))
        ]

    def _changed(self, suspects: Sequence[int]) -> list[str]:
        """Ends a change: drops the suspects that no document holds, and lets every reader know."""
        orphans = passages.drop_orphans(self._connection, suspects)
        self._set_meta("generation", str(self._generation() + 1))
        return orphans

    # ---- chunks -----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of different chunks."""
        return int(self._rows("SELECT count(*) FROM chunk")[0][0])

    def __bool__(self) -> bool:
        """An empty corpus is a corpus."""
        return True

    def chunk_ids(self) -> list[str]:
        """Ids of all chunks, in the order they were first stored."""
        return [row[0] for row in self._rows("SELECT chunk_id FROM chunk ORDER BY id")]

    def chunks_of(self, source: str) -> list[Chunk]:
        """Chunks of one document, in its order; none where it is not there."""
        rows = self._rows(
            "SELECT text, start, end, tokens, chunk_id FROM passage "
            "JOIN chunk ON chunk.id = passage.chunk "
            "JOIN document ON document.id = passage.document WHERE source = ? ORDER BY start",
            source,
        )
        return [Chunk(*row) for row in rows]

    def text(self, chunk_id: str) -> str:
        """Canonical text of a chunk. Raises :class:`KeyError` where it is not there."""
        rows = self._rows("SELECT text FROM chunk WHERE chunk_id = ?", chunk_id)
        if not rows:
            raise KeyError(chunk_id)
        return str(rows[0][0])

    def chunk(self, chunk_id: str) -> StoredChunk:
        """A chunk at the first place it was stored for. Raises :class:`KeyError`."""
        rows = self._rows(
            f"{passages.STORED_CHUNK} WHERE chunk_id = ? ORDER BY passage.id LIMIT 1", chunk_id
        )
        if not rows:
            raise KeyError(chunk_id)
        return passages.stored_chunk(rows[0])

    @property
    def anchors(self) -> AnchorIndex:
        """Index of all chunks, loaded on first use and kept up with changes of any process."""
        with self._lock:
            generation = self._generation()
            if self._anchors is None:
                self._anchors = AnchorIndex(self._text_of)
            if self._anchors_generation != generation:
                self._refresh_anchors(self._anchors)
                self._anchors_generation = generation
            return self._anchors

    def _text_of(self, chunk_id: str) -> str:
        return self.text(chunk_id)

    def _refresh_anchors(self, anchors: AnchorIndex) -> None:
        rows = self._rows("SELECT chunk_id, anchor_hash, length, digest FROM chunk")
        present = {row[0] for row in rows}
        for row in anchors.rows():
            if row.chunk_id not in present:
                anchors.discard(row.chunk_id)
        for values in rows:
            anchors.add_row(AnchorRow(*values))

    # ---- vectors ----------------------------------------------------------------------------

    def known_vectors(self, title: str, chunk_ids: Sequence[str]) -> dict[str, np.ndarray]:
        """Vectors already stored for these chunks under this title: no need to embed them again."""
        known = {}
        for chunk_id in dict.fromkeys(chunk_ids):
            rows = self._rows(
                "SELECT vector FROM passage JOIN chunk ON chunk.id = passage.chunk "
                "JOIN document ON document.id = passage.document "
                "WHERE chunk_id = ? AND title = ? LIMIT 1",
                chunk_id,
                title,
            )
            if rows:
                known[chunk_id] = np.frombuffer(rows[0][0], np.float32)
        return known

    def nearest(self, vector: np.ndarray, k: int) -> list[tuple[StoredChunk, float]]:
        """The k nearest different chunks with their L2 distance, nearest first.

        ``vector``: float32 [dim]. Each chunk comes at the place whose vector is nearest.
        """
        with self._reading():
            dim = self._dim()
            if dim is None or k < 1:
                return []
            if vector.shape != (dim,):
                raise InvalidInputError(
                    f"a vector of shape {vector.shape}, expected ({dim},); "
                    "use the embedder that the corpus was ingested with"
                )
            self._vectors.refresh(
                self._connection, self._meta("corpus_id"), self._generation(), dim
            )
            return self._distinct(vector, k)

    def _distinct(self, vector: np.ndarray, k: int) -> list[tuple[StoredChunk, float]]:
        """A chunk that stands in many documents fills many hits: widen until k differ."""
        count = self._rows("SELECT count(*) FROM passage")[0][0]
        width = k
        while True:
            found: dict[str, tuple[StoredChunk, float]] = {}
            for passage, distance in self._vectors.search(vector, width):
                rows = self._rows(f"{passages.STORED_CHUNK} WHERE passage.id = ?", passage)
                if rows:
                    found.setdefault(rows[0][0], (passages.stored_chunk(rows[0]), distance))
            if len(found) >= k or width >= count:
                return list(found.values())[:k]
            width *= 4

    def _dim(self) -> int | None:
        """Numbers in each vector, ``None`` while there are no vectors: any will do then."""
        value = self._meta("dim")
        empty = not self._rows("SELECT 1 FROM passage LIMIT 1")
        return None if value is None or empty else int(value)

    def _check_vectors(self, vectors: np.ndarray, chunks: int) -> None:
        """Inside a transaction: the first vectors decide the corpus's dimension."""
        if not chunks and not vectors.size:
            return
        if vectors.ndim != 2 or len(vectors) != chunks:
            raise InvalidInputError(
                f"vectors of shape {vectors.shape} for {chunks} chunks, expected ({chunks}, dim)"
            )
        dim = self._dim()
        if dim is None:
            self._set_meta("dim", str(vectors.shape[1]))
        elif dim != vectors.shape[1]:
            raise InvalidInputError(
                f"vectors of {vectors.shape[1]} numbers in a corpus of {dim}; "
                "use the embedder that the corpus was ingested with"
            )

    # ---- the file ---------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            self._check_open()
            if self.read_only:
                raise CorpusError(
                    f"the corpus at {self.directory} is read-only, expected one that can be "
                    "written; change its permissions or choose another --store"
                )
            with database.transaction(self._connection, self._path):
                yield

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Everything read within is of one state of the file, whoever writes meanwhile."""
        with self._lock:
            self._check_open()
            with database.transaction(self._connection, self._path, reads_only=True):
                yield

    def _rows(self, query: str, *parameters: str | int) -> list[tuple]:
        with self._lock:
            self._check_open()
            try:
                return self._connection.execute(query, parameters).fetchall()
            except sqlite3.Error as exc:
                raise database.mapped(exc, self._path) from exc

    def _check_open(self) -> None:
        if self._closed:
            raise CorpusError(f"the corpus at {self.directory} is closed; open it again")

    def _generation(self) -> int:
        return int(self._meta("generation") or 0)

    def _meta(self, key: str) -> str | None:
        rows = self._rows("SELECT value FROM meta WHERE key = ?", key)
        return rows[0][0] if rows else None

    def _set_meta(self, key: str, value: str) -> None:
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
