"""One search over a corpus: by vectors, by full text, or both, merged by reciprocal rank fusion.

Fusion adds the reciprocal ranks of a chunk in both rankings (Cormack, Clarke and Büttcher, SIGIR 2009), so
that cosines and BM25 need not be comparable. The words count as much as they tell: a key that one chunk has
decides, and words that many chunks share hardly count. Equal weights would put a chunk that is tenth in both
rankings before one that has the key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from blendrag.config import SearchMode
from blendrag.corpus.database import CorpusFile
from blendrag.corpus.documents import StoredChunk, chunk_at, chunks_at
from blendrag.corpus.full_text import DamagedIndex, FullTextIndex
from blendrag.corpus.vectors import VectorIndex, vector_of

#: Constant of reciprocal rank fusion. The paper has 60 for rankings of equal worth; a smaller one lets the
#: first ranks decide. Chosen on the half of the questions that ``blendrag bench search`` does not report: 1,
#: 10, and shares without a root, are within .01 of its recall.
RANK_OFFSET = 3
#: The hit that the best one of the words is compared with, to see how far it stands out.
_COMPARED_RANK = 6
#: Different chunks of each ranking that are fused: these times k, and at least so many.
DEPTH_FACTOR, LEAST_DEPTH = 5, 50


@dataclass(frozen=True)
class SearchQuery:
    """What is searched for. ``vector``: of the text, float32 [dim]; only lexical search does without."""

    text: str
    vector: np.ndarray | None
    mode: SearchMode


@dataclass(frozen=True)
class FoundChunk:
    """A chunk that a search found. ``distance``: L2 of its vector from the question's, if there is one.

    ``score``: what the ranking follows, larger is better: cosine similarity (dense), BM25 (lexical), or the
    share of the best possible sum of fusion (hybrid), 1 for the first of both rankings.
    """

    chunk: StoredChunk
    distance: float | None
    score: float


class _Hit(NamedTuple):
    """A passage in a ranking, and the row of its chunk. ``score``: of the vectors, the distance."""

    passage: int
    chunk: int
    score: float


class CorpusSearch:
    """The indexes of one corpus. Thread-safe."""

    def __init__(self, file: CorpusFile, vectors: VectorIndex) -> None:
        self._file = file
        self._vectors = vectors
        self.full_text = FullTextIndex(file)

    def available(self, mode: SearchMode) -> SearchMode:
        """``mode``, or dense if the full-text index cannot be used; builds the index if it has to be."""
        if mode == "dense" or not (why := self.full_text.prepare()):
            return mode
        self._file.warn_once(
            f"search {mode} of the corpus at {self._file.directory} is dense: {why}"
        )
        return "dense"

    def find(
        self, queries: Sequence[SearchQuery], k: int, allowed: Callable[[], np.ndarray | None]
    ) -> list[list[FoundChunk]]:
        """For each query the k best different chunks, the best first, each at its best place.

        All are found in one state of the corpus. ``allowed()``: ids of passages in that state, int64 [n];
        others are not found. ``None`` allows all.
        """
        try:
            return self._in_one_state(queries, k, allowed)
        except DamagedIndex:
            why = self.full_text.rebuild_damaged()
        if why:
            queries = [replace(query, mode="dense") for query in queries]
        return self._in_one_state(queries, k, allowed)

    def _in_one_state(
        self, queries: Sequence[SearchQuery], k: int, allowed: Callable[[], np.ndarray | None]
    ) -> list[list[FoundChunk]]:
        with self._file.reading():
            passages = allowed()
            return [
                self._dense(query, k, passages)
                if query.mode == "dense"
                else self._with_text(query, k, passages)
                for query in queries
            ]

    def _dense(self, query: SearchQuery, k: int, allowed: np.ndarray | None) -> list[FoundChunk]:
        if query.vector is None:
            return []

        def accept(passage: int) -> tuple[str, StoredChunk] | None:
            found = chunk_at(self._file, passage)
            return None if found is None else (found.chunk_id, found)

        hits = self._vectors.nearest(query.vector, k, accept, allowed)
        return [FoundChunk(found, distance, 1 - distance**2 / 2) for found, distance in hits]

    def _with_text(
        self, query: SearchQuery, k: int, allowed: np.ndarray | None
    ) -> list[FoundChunk]:
        depth = max(LEAST_DEPTH, DEPTH_FACTOR * k)
        vector = query.vector if query.mode == "hybrid" else None
        ranked = self.full_text.ranked(query.text, allowed, rare_only=vector is not None)
        lexical = self._different(ranked.passages, depth)
        if vector is None:
            return self._loaded(lexical, query, k)
        nearest = self._different(self._vectors.ascending(vector, depth, allowed), depth)
        return self._loaded(_fused(nearest, lexical, ranked.information), query, k)

    def _different(self, ranked: Iterable[tuple[int, float]], depth: int) -> list[_Hit]:
        """The first passage of each chunk, ``depth`` at most."""
        first: dict[int, _Hit] = {}
        left = iter(ranked)
        while len(first) < depth and (batch := list(islice(left, depth))):
            chunks = self._chunks_of([passage for passage, _ in batch])
            for passage, score in batch:
                if (chunk := chunks.get(passage)) is not None:
                    first.setdefault(chunk, _Hit(passage, chunk, score))
        return list(first.values())[:depth]

    def _chunks_of(self, passages: Sequence[int]) -> dict[int, int]:
        """Row of the chunk by passage."""
        return dict(
            self._file.rows(
                "SELECT id, chunk FROM passage WHERE id IN (SELECT value FROM json_each(?))",
                json.dumps(passages),
            )
        )

    def _loaded(self, ranked: Sequence[_Hit], query: SearchQuery, k: int) -> list[FoundChunk]:
        """The first k chunks that are not damaged."""
        found: list[FoundChunk] = []
        left = iter(ranked)
        while hits := list(islice(left, k - len(found))):
            chunks = chunks_at(self._file, [hit.passage for hit in hits])
            for hit in hits:
                if (chunk := chunks.get(hit.passage)) is not None:
                    found.append(FoundChunk(chunk, _distance(chunk, query.vector), hit.score))
        return found


def _fused(nearest: Sequence[_Hit], lexical: Sequence[_Hit], information: float) -> list[_Hit]:
    """One hit of each chunk, by the weighted sum of their reciprocal ranks, 1 at most."""
    weight, best = _weight(lexical, information), lexical[0].score if lexical else 0.0
    places: dict[int, int] = {}
    sums: dict[int, float] = {}
    for ranking, shares in (
        (nearest, [1.0] * len(nearest)),
        (lexical, [weight * _share(hit.score, best) for hit in lexical]),
    ):
        for rank, (hit, share) in enumerate(zip(ranking, shares, strict=True), 1):
            places.setdefault(hit.chunk, hit.passage)
            reciprocal = (RANK_OFFSET + 1) / (RANK_OFFSET + rank)
            sums[hit.chunk] = sums.get(hit.chunk, 0.0) + share * reciprocal
    ordered = sorted(sums, key=lambda chunk: (-sums[chunk], places[chunk]))
    return [_Hit(places[chunk], chunk, sums[chunk] / (1 + weight)) for chunk in ordered]


def _share(score: float, best: float) -> float:
    """What a hit counts whose rank hides how far it is behind the best one."""
    return math.sqrt(max(0.0, score) / best) if best > 0 else 1.0


def _weight(lexical: Sequence[_Hit], information: float) -> float:
    """How much the ranking by words tells, in [0, 2]; that by vectors counts 1.

    The share of what the question says that the best hit has, and how far it stands out among the hits.
    """
    if not lexical:
        return 0.0
    best = lexical[0].score
    coverage = min(1.0, best / information) if information > 0 else 0.0
    compared = lexical[min(_COMPARED_RANK, len(lexical)) - 1].score if len(lexical) > 1 else 0.0
    return coverage + (max(0.0, 1 - compared / best) if best > 0 else 0.0)


def _distance(chunk: StoredChunk, vector: np.ndarray | None) -> float | None:
    own = None if vector is None else vector_of(chunk.vector, len(vector))
    return None if own is None or vector is None else float(np.linalg.norm(own - vector))
