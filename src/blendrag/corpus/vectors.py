"""Nearest neighbours over the vectors of passages, by a FAISS index in memory.

The index is built from the database on the first search and then kept up to date by the difference of passage
ids, as a passage's vector never changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from blendrag.corpus.database import PASSAGE, CorpusFile, damaged, damaged_settings
from blendrag.errors import InvalidInputError

T = TypeVar("T")

#: Vectors read from the database at a time.
_BATCH = 4096
#: Largest dimension of a vector.
MAX_DIM = 1 << 20


class VectorIndex:
    """The vectors of one corpus: ``IndexFlatL2`` in an ``IndexIDMap2``, by passage id."""

    def __init__(self, file: CorpusFile) -> None:
        self._file = file
        self._index: Any = None
        self._generation = -1

    def dim(self) -> int | None:
        """Numbers in each vector; ``None`` while there are no vectors, when any dimension is accepted."""
        dim = self._file.number("dim")
        if dim is None:
            return None
        if not 0 < dim <= MAX_DIM:
            raise damaged_settings(f"setting dim is {dim}", self._file.path)
        query = "SELECT 1 FROM passage WHERE length(vector) > 0 LIMIT 1"
        return dim if self._file.known(query, lambda: self._file.rows(query)) else None

    def check(self, vectors: np.ndarray, chunks: int) -> None:
        """Check new vectors, in a transaction; the first ones set the corpus's dimension.

        ``vectors``: [chunks, dim]; with dim 0, search will not find the chunks.
        """
        if not chunks and not vectors.size:
            return
        if vectors.ndim != 2 or len(vectors) != chunks:
            raise InvalidInputError(
                f"vectors of shape {vectors.shape} for {chunks} chunks, expected ({chunks}, dim)"
            )
        if vectors.shape[1] == 0:
            return
        dim = self.dim()
        if dim is None:
            self._file.set_meta("dim", str(vectors.shape[1]))
        elif dim != vectors.shape[1]:
            raise InvalidInputError(
                f"vectors of {vectors.shape[1]} numbers in a corpus of {dim}; "
                "use the embedder that the corpus was ingested with"
            )

    def nearest(
        self,
        vector: np.ndarray,
        k: int,
        accept: Callable[[int], tuple[Hashable, T] | None],
        allowed: np.ndarray | None = None,
    ) -> list[tuple[T, float]]:
        """The k nearest passages that ``accept`` takes, the nearest of each key, with their L2 distance.

        ``vector``: float32 [dim]. ``accept(passage id)`` gives a key and a value. ``allowed``: ids of
        passages, int64 [n]; others are not found. Raises :class:`InvalidInputError` for a vector of another
        length than the corpus's.
        """
        with self._file.reading():
            found: dict[Hashable, tuple[T, float]] = {}
            for passage, distance in self.ascending(vector, k, allowed):
                if accepted := accept(passage):
                    found.setdefault(accepted[0], (accepted[1], distance))
                    if len(found) == k:
                        break
            return list(found.values())

    def ascending(
        self, vector: np.ndarray, width: int, allowed: np.ndarray | None = None
    ) -> Iterator[tuple[int, float]]:
        """Passage ids and L2 distances, nearest first, by searches of growing width; in a read transaction.

        A chunk that many documents contain fills many hits, so more than ``width`` may be needed. Raises as
        :meth:`nearest`.
        """
        dim = self.dim()
        if dim is None or width < 1:
            return
        if vector.shape != (dim,):
            raise InvalidInputError(
                f"a vector of shape {vector.shape}, expected ({dim},); "
                "use the embedder that the corpus was ingested with"
            )
        self._refresh(dim)
        import faiss

        given, size = np.asarray(vector, np.float32)[None], self._index.ntotal
        parameters = None
        if allowed is not None:
            size = min(size, len(allowed))
            selector = faiss.IDSelectorBatch(allowed)
            parameters = faiss.SearchParameters(sel=selector)  # type: ignore[call-arg]
        seen: set[int] = set()
        while len(seen) < size:
            with _one_thread():
                squared, ids = self._index.search(given, min(width, size), params=parameters)
            for passage, distance in zip(ids[0].tolist(), squared[0].tolist(), strict=True):
                if passage < 0:  # the rest of those allowed have no vector
                    return
                if passage not in seen:
                    seen.add(passage)
                    yield passage, math.sqrt(max(distance, 0.0))
            width *= 4

    def _refresh(self, dim: int) -> None:
        """Make the index hold exactly the database's undamaged passages, in one read transaction."""
        import faiss

        generation = self._file.generation()
        if self._index is not None and (self._index.d, self._generation) == (dim, generation):
            return
        index, self._index = self._index, None  # a half-refreshed index might get a vector twice
        if index is None or index.d != dim:
            index = faiss.IndexIDMap2(faiss.IndexFlatL2(dim))
        # Those without a vector have their own index; one filter over all would read every vector.
        unsearchable = _passages(self._file, "WHERE length(vector) = 0")
        present = np.setdiff1d(_passages(self._file, "NOT INDEXED"), unsearchable)
        known = faiss.vector_to_array(index.id_map)
        index.remove_ids(np.setdiff1d(known, present))
        new = np.setdiff1d(present, known)
        for at in range(0, len(new), _BATCH):
            ids, vectors = _vectors_of(self._file, new[at : at + _BATCH], dim)
            index.add_with_ids(vectors, ids)
        self._index, self._generation = index, generation


@contextmanager
def _one_thread() -> Iterator[None]:
    """FAISS (1.15) searches for one vector with one thread: a second one makes that slower."""
    import faiss

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _passages(file: CorpusFile, condition: str) -> np.ndarray:
    """Ids of passages, ascending.  int64"""
    ids = [0]
    for (passage,) in file.connection.execute(f"SELECT id FROM passage {condition} ORDER BY id"):
        if passage <= ids[-1]:  # pages of a damaged file may form a cycle
            raise damaged("its passages are out of order", file.path)
        ids.append(passage)
    return np.asarray(ids[1:], np.int64)


def _vectors_of(file: CorpusFile, ids: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and vectors of the undamaged passages among ``ids``.  int64 [n], float32 [n, dim]"""
    # ids ascend; a range and a filter avoid a list of thousands of parameters.
    rows = file.sound_rows(
        (PASSAGE,), "WHERE id BETWEEN ? AND ? ORDER BY id", int(ids[0]), int(ids[-1])
    )
    wanted = set(ids.tolist())
    found: dict[int, np.ndarray] = {}
    for ((passage, *_, data),) in rows:
        if passage in wanted:
            vector = vector_of(data, dim)
            if vector is not None:
                found[passage] = vector
            elif data:
                file.warn_damaged(f"passage {passage}")
    vectors = np.stack(list(found.values())) if found else np.zeros((0, dim), np.float32)
    return np.fromiter(found, np.int64, len(found)), vectors


def vector_of(data: bytes, dim: int) -> np.ndarray | None:
    """The vector of a passage, float32 [dim]; ``None`` if the bytes are not one."""
    if len(data) != 4 * dim:
        return None
    vector = np.frombuffer(data, np.float32)
    return vector if np.isfinite(vector).all() else None
