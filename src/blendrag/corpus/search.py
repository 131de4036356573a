"""Which passages lie nearest to a vector, and which vectors a corpus takes.

Owns the vector index's place in the corpus and the widening of a search until enough hits are
wanted ones. Does not know what a passage says.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np

from blendrag.corpus.database_errors import damaged_settings
from blendrag.corpus.file import CorpusFile
from blendrag.corpus.vectors import FILE_NAME, VectorIndex
from blendrag.errors import InvalidInputError

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
