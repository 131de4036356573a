"""Nearest neighbours."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from blendrag.corpus.database import PASSAGE, CorpusFile, damaged, damaged_settings
from blendrag.errors import InvalidInputError
from blendrag.store.regular_files import open_regular, read_bytes, replace

FILE_NAME = "vectors.faiss"
_MAGIC = b"BLRGVEC3"
#: Magic, generation of the database that the index was made of, digest. Behind it int64 ids, ascending, and
#: float32 vectors: FAISS would believe the sizes that its own format states.
_HEADER = struct.Struct("<8sQ16s")
#: Vectors read from the database at a time.
_BATCH = 4096


class VectorIndex:
    """``IndexFlatL2`` in an ``IndexIDMap2``, by passage id. The caller holds the corpus's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._index: Any = None
        self._ids = np.zeros(0, np.int64)  # sorted
        self._corpus_id: str | None = None
        self._generation = -1
        self._saved_ids = np.zeros(0, np.int64)

    def refresh(
        self,
        file: CorpusFile,
        corpus_id: str | None,
        generation: int,
        dim: int,
        has_unsearchable: bool = False,
    ) -> None:
        """Makes the index hold exactly the database's passages, but for those that are damaged.

        Caller is in one transaction since it read the other arguments. A database without
        ``corpus_id`` has no cache. With ``has_unsearchable``, some passages have no vector.
        """
        try:
            self._refresh(file, corpus_id, generation, dim, has_unsearchable)
        except BaseException:
            self._index = None  # left halfway, it might be given a vector twice
            raise

    def _refresh(
        self,
        file: CorpusFile,
        corpus_id: str | None,
        generation: int,
        dim: int,
        has_unsearchable: bool,
    ) -> None:
        if self._index is not None and (self._index.d, self._generation) == (dim, generation):
            return
        wanted = _passages(file, "NOT INDEXED")
        if has_unsearchable:  # two reads of indexes, where one filter would read every vector
            unsearchable = _passages(file, "WHERE length(vector) = 0")
            wanted = np.setdiff1d(wanted, unsearchable, assume_unique=True)
        if self._index is None or self._index.d != dim:
            self._index = self._read(corpus_id, generation, dim, 2 * len(wanted) + _BATCH)
            self._ids = self._saved_ids = _ids_of(self._index)
        self._corpus_id = corpus_id
        gone = np.setdiff1d(self._ids, wanted, assume_unique=True)
        new = np.setdiff1d(wanted, self._ids, assume_unique=True)
        if len(gone):
            self._index.remove_ids(gone)
        for at in range(0, len(new), _BATCH):
            ids, vectors = _vectors_of(file, new[at : at + _BATCH], dim)
            self._index.add_with_ids(vectors, ids)
        self._ids, self._generation = np.sort(_ids_of(self._index)), generation

    def search(self, vector: np.ndarray, k: int) -> list[tuple[int, float]]:
        """``(passage id, L2 distance)`` of the k nearest, nearest first. After :meth:`refresh`."""
        k = min(k, len(self._ids))
        if k == 0:
            return []
        query = np.ascontiguousarray(vector, np.float32).reshape(1, -1)
        squared, ids = self._index.search(query, k)
        distances = np.sqrt(np.maximum(squared[0], 0.0))
        return list(zip(ids[0].tolist(), distances.tolist(), strict=True))

    def save(self) -> None:
        """Writes the file if the index changed since it was read or written. Best effort."""
        if self._index is None or self._corpus_id is None:
            return
        if np.array_equal(self._saved_ids, self._ids):
            return
        import faiss

        ids = _ids_of(self._index)
        flat = faiss.downcast_index(self._index.index)
        vectors = np.ascontiguousarray(flat.reconstruct_n(0, len(ids)), np.float32)
        payload = ids.tobytes(), vectors.tobytes()
        digest = _digest(self._corpus_id, self._generation, *payload)
        header = _HEADER.pack(_MAGIC, self._generation, digest)
        with contextlib.suppress(
            OSError
        ):  # a full disk costs the next process a rebuild, nothing else
            replace(self._path, header, *payload)
            self._saved_ids = self._ids

    def saved_generation(self) -> int:
        """What the file says it was made of; -1 where there is none."""
        try:
            with os.fdopen(open_regular(self._path), "rb") as file:
                magic, generation, _ = _HEADER.unpack(file.read(_HEADER.size))
        except (OSError, struct.error):
            return -1
        return int(generation) if magic == _MAGIC else -1

    def drop(self) -> None:
        """Removes the file. Best effort."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _read(self, corpus_id: str | None, generation: int, dim: int, most: int) -> Any:
        """The index from its file, or an empty one when there is none that fits.

        ``most``: vectors that a file may hold to be worth reading.
        """
        import faiss

        index = faiss.IndexIDMap2(faiss.IndexFlatL2(dim))
        row_bytes = 8 + 4 * dim
        try:
            data = read_bytes(self._path, _HEADER.size + most * row_bytes)
        except OSError:
            data = b""
        rows, rest = divmod(len(data) - _HEADER.size, row_bytes)
        if rows > 0 and not rest and corpus_id is not None and _fits(data, corpus_id, generation):
            ids = np.frombuffer(data, np.int64, rows, _HEADER.size)
            vectors = np.frombuffer(data, np.float32, rows * dim, _HEADER.size + 8 * rows)
            if (np.diff(ids) > 0).all():
                index.add_with_ids(vectors.reshape(rows, dim), ids)
        return index


def _fits(data: bytes, corpus_id: str, generation: int) -> bool:
    """Whether the file's bytes are as written, for this corpus, and not from its future."""
    if len(data) <= _HEADER.size:
        return False
    magic, saved, digest = _HEADER.unpack_from(data)
    payload = memoryview(data)[_HEADER.size :]
    return magic == _MAGIC and saved <= generation and digest == _digest(corpus_id, saved, payload)


def _digest(corpus_id: str, generation: int, *payload: bytes | memoryview) -> bytes:
    """xxh3-128 over the vectors and over what they were made of."""
    hashed = xxhash.xxh3_128(f"{corpus_id} {generation} ".encode("utf-8", "surrogateescape"))
    for part in payload:
        hashed.update(part)
    return hashed.digest()


def _passages(file: CorpusFile, which: str) -> np.ndarray:
    """Ids of passages, ascending.  int64"""
    last = 0
    ids = []
    for (passage,) in file.connection.execute(f"SELECT id FROM passage {which} ORDER BY id"):
        if passage <= last:  # a damaged page may lead to others again and again
            raise damaged("its passages are out of order", file.path)
        ids.append(last := passage)
    return np.asarray(ids, np.int64)


def _ids_of(index: Any) -> np.ndarray:
    import faiss

    return np.asarray(faiss.vector_to_array(index.id_map), np.int64)


def _vectors_of(file: CorpusFile, ids: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Sound vectors of these passages, in their order, behind their ids.  int64 [n], float32 [n, dim]"""
    # ids ascend; a range and a filter spare SQLite a list of thousands of parameters.
    rows = file.connection.execute(
        f"SELECT {PASSAGE.selected} FROM passage WHERE id BETWEEN ? AND ? ORDER BY id",
        (int(ids[0]), int(ids[-1])),
    )
    wanted = set(ids.tolist())
    found: dict[int, np.ndarray] = {}
    for row in rows:
        if row[0] not in wanted or (checked := file.checked(row, PASSAGE)) is None:
            continue
        ((passage, *_, data),) = checked
        vector = vector_of(data, dim)
        if vector is not None:
            found[passage] = vector
        elif data:
            file.warn_damaged(f"passage {passage}")
    vectors = np.stack(list(found.values())) if found else np.zeros((0, dim), np.float32)
    return np.fromiter(found, np.int64, len(found)), vectors


def vector_of(data: bytes, dim: int) -> np.ndarray | None:
    """The vector of a passage, float32 [dim]; ``None`` for bytes that are none."""
    if len(data) != 4 * dim:
        return None
    vector = np.frombuffer(data, np.float32)
    return vector if np.isfinite(vector).all() else None


T = TypeVar("T")

#: Numbers of a vector at most.
MAX_DIM = 1 << 20
#: Set in the corpus's settings once a passage without a vector was stored.
UNSEARCHABLE = "unsearchable"


class VectorSearch:
    """The vectors of one corpus."""

    def __init__(self, file: CorpusFile) -> None:
        self._file = file
        self.index = VectorIndex(file.directory / FILE_NAME)

    def nearest(
        self, vector: np.ndarray, k: int, accept: Callable[[int], tuple[Hashable, T] | None]
    ) -> list[tuple[T, float]]:
        """The k nearest that ``accept`` takes, of each key the nearest, with their L2 distance.

        ``vector``: float32 [dim]. ``accept(passage id)`` gives a key and a value. Raises
        :class:`InvalidInputError` for a vector of another length than the corpus's.
        """
        with self._file.reading():
            dim = self.dim()
            if dim is None or k < 1:
                return []
            if vector.shape != (dim,):
                raise InvalidInputError(
                    f"a vector of shape {vector.shape}, expected ({dim},); "
                    "use the embedder that the corpus was ingested with"
                )
            self.index.refresh(
                self._file,
                self._file.meta("corpus_id"),
                self._file.generation(),
                dim,
                self._has_unsearchable(),
            )
            return self._widening(vector, k, accept)

    def _widening(
        self, vector: np.ndarray, k: int, accept: Callable[[int], tuple[Hashable, T] | None]
    ) -> list[tuple[T, float]]:
        """A chunk that stands in many documents fills many hits: widen until k differ."""
        looked_at: dict[int, tuple[Hashable, T] | None] = {}
        width = k
        while True:
            found: dict[Hashable, tuple[T, float]] = {}
            hits = self.index.search(vector, width)
            for passage, distance in hits:
                if passage not in looked_at:
                    looked_at[passage] = accept(passage)
                if accepted := looked_at[passage]:
                    found.setdefault(accepted[0], (accepted[1], distance))
                    if len(found) == k:
                        return list(found.values())
            if len(hits) < width:
                return list(found.values())
            width *= 4

    def dim(self) -> int | None:
        """Numbers in each vector, ``None`` while there are no vectors: any will do then."""
        dim = self._file.number("dim")
        if dim is None:
            return None
        if not 0 < dim <= MAX_DIM:
            raise damaged_settings(f"setting dim is {dim}", self._file.path)
        found = "WHERE length(vector) > 0 " if self._has_unsearchable() else ""
        return dim if self._file.rows(f"SELECT 1 FROM passage {found}LIMIT 1") else None

    def check(self, vectors: np.ndarray, chunks: int) -> None:
        """Inside a transaction: the first vectors decide the corpus's dimension.

        ``vectors``: [chunks, dim]; of no numbers at all, they will not be found.
        """
        if not chunks and not vectors.size:
            return
        if vectors.ndim != 2 or len(vectors) != chunks:
            raise InvalidInputError(
                f"vectors of shape {vectors.shape} for {chunks} chunks, expected ({chunks}, dim)"
            )
        if vectors.shape[1] == 0:
            self._file.set_meta(UNSEARCHABLE, "1")
            return
        dim = self.dim()
        if dim is None:
            self._file.set_meta("dim", str(vectors.shape[1]))
        elif dim != vectors.shape[1]:
            raise InvalidInputError(
                f"vectors of {vectors.shape[1]} numbers in a corpus of {dim}; "
                "use the embedder that the corpus was ingested with"
            )

    def _has_unsearchable(self) -> bool:
        return self._file.meta(UNSEARCHABLE) is not None
