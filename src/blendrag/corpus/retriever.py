"""From a question to the chunks to read, in reading order.

Chunks are found by vectors, by full text or by both (:mod:`blendrag.corpus.search`). They are returned
document by document, that of the best chunk first, and in the document's order, so that "she" or "this city"
follows what it refers to.

In a conversation a question may go on with the one before ("And when was it built?") or change the topic.
Both are searched for, the question alone and the two together, and chunks are taken from the results in turn.
The question alone comes first, unless the two together have a hit that is clearly nearer. A reranker reads
the one that comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import PurePath
from typing import Any

import numpy as np

from blendrag.config import OPTIONS, SearchMode, settings
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.embedder import Embedder, refuse_given
from blendrag.corpus.embedding_turns import Check, proceed
from blendrag.corpus.filters import FilterLike
from blendrag.corpus.reranker import Reranker
from blendrag.corpus.search import FoundChunk, SearchQuery
from blendrag.errors import check_question
from blendrag.text.names import page_label
from blendrag.text.readers import MetadataValue

#: A question goes on with the one before if the two together are nearer to a chunk than this share of the
#: distance of the question alone. Chosen on the demo's corpora: most questions such as "And how wide is it?"
#: are below, and few questions that change the topic.
FOLLOW_UP_DISTANCE = 0.88
#: Chunks that a reranker sorts: these times ``top_k``, and at least so many.
RERANKED_FACTOR, LEAST_RERANKED = 3, 20


@dataclass(frozen=True)
class RetrievedChunk:
    """A chunk that was found for a question.

    ``rank``: 1 is the best. ``score``: what the ranking follows, larger is better: cosine similarity (dense
    search), BM25 (lexical), or the share of the best possible sum of both rankings (hybrid), in [0, 1]; with
    a reranker its score.
    ``distance``: L2 of its vector from the question's, in [0, 2], smaller is nearer; ``None`` in lexical
    search. In a conversation, score and distance are those of the question alone or of the question with the
    one before, whichever is better.
    """

    chunk_id: str
    text: str
    source: str
    title: str
    start: int
    end: int
    distance: float | None
    metadata: Mapping[str, MetadataValue]
    score: float
    rank: int
    page: int | None = None
    """The page of a PDF that it begins on, from 1."""
    last_page: int | None = None
    """The page that it ends on."""

    @property
    def file_name(self) -> str:
        """The last part of its source."""
        return PurePath(self.source).name

    @property
    def page_label(self) -> str:
        """Its page or pages: ``3``, ``3–4``; empty without pages."""
        return page_label(self.page, self.last_page)

    def as_dict(self) -> dict[str, Any]:
        """What is told of a source of an answer, without its metadata."""
        return {name: getattr(self, name) for name in _TOLD}


#: In this order.
_TOLD = ("source", "file_name", "title", "page", "last_page", "start", "end", "rank", "score", "distance",
         "chunk_id", "text")  # fmt: skip


class Retriever:
    def __init__(
        self,
        corpus: Corpus,
        embedder: Embedder,
        search: SearchMode | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        """``search``: how chunks are found unless a call says otherwise; ``None``: as the settings say."""
        self.reranker = reranker
        self.corpus = corpus
        self.embedder = embedder
        self.search: SearchMode = search or settings().search

    def retrieve(
        self,
        question: str,
        top_k: int,
        check: Check = proceed,
        earlier: str = "",
        *,
        search: SearchMode | None = None,
        filter: FilterLike | None = None,
    ) -> list[RetrievedChunk]:
        """At most ``top_k`` different chunks, in reading order. ``check`` may raise to give up. ``earlier``:
        the question before it in a conversation. ``filter``: which documents are searched.

        Raises :class:`InvalidInputError` for an empty question, an empty corpus, ``top_k`` < 1, or a wrong
        filter.
        """
        check_question(question)
        OPTIONS["top_k"].check(top_k)
        OPTIONS["search"].check(search)
        manifest = self.corpus.require_documents()
        allowed = self.corpus.allowed(filter)
        if allowed is not None and not allowed.size:
            return []
        mode = self.corpus.searches.available(search or self.search)
        k = top_k if self.reranker is None else max(LEAST_RERANKED, RERANKED_FACTOR * top_k)
        searched = [question, f"{earlier}\n{question}"] if earlier.strip() else [question]
        vectors: Sequence[np.ndarray | None] = [None] * len(searched)
        if mode != "lexical":
            if manifest is not None:
                refuse_given(manifest.embedder)
            vectors = [*self.embedder.embed_queries(searched, check=check)]
        queries = [SearchQuery(*each, mode) for each in zip(searched, vectors, strict=True)]
        hits = self.corpus.search(queries, k, filter)
        goes_on = len(hits) > 1 and _goes_on(*hits)
        found = _merged(*(hits[::-1] if goes_on else hits), top_k=k)
        if self.reranker is not None:
            texts = [each.chunk.text for each in found]
            scores = self.reranker.scores(searched[goes_on], texts, check)
            found = [
                replace(each, score=float(score)) for each, score in zip(found, scores, strict=True)
            ]
        if mode == "dense" or self.reranker is not None:
            found.sort(key=lambda each: -each.score)
        chunks = [
            RetrievedChunk(
                c.chunk_id, c.text, c.source, c.title, c.start, c.end, each.distance, c.metadata,
                each.score, rank, c.page, c.last_page,
            )
            for rank, each in enumerate(found[:top_k], 1)
            for c in (each.chunk,)
        ]  # fmt: skip
        best: dict[str, int] = {}
        for chunk in chunks:
            best.setdefault(chunk.source, chunk.rank)
        return sorted(chunks, key=lambda chunk: (best[chunk.source], chunk.source, chunk.start))


def _goes_on(alone: Sequence[FoundChunk], together: Sequence[FoundChunk]) -> bool:
    """Whether a question goes on with the one before, by what is found for it and for the two together.

    Lexical search has no distances; there the question alone goes first.
    """
    return _nearest(together) < FOLLOW_UP_DISTANCE * _nearest(alone)


def _merged(*searches: Sequence[FoundChunk], top_k: int) -> list[FoundChunk]:
    """The first ``top_k`` different chunks of all searches in turn, each at its better score."""
    merged: dict[str, FoundChunk] = {}
    for hit in chain.from_iterable(zip_longest(*searches)):
        if hit is not None and (hit.chunk.chunk_id in merged or len(merged) < top_k):
            known = merged.setdefault(hit.chunk.chunk_id, hit)
            merged[hit.chunk.chunk_id] = max(hit, known, key=lambda each: each.score)
    return list(merged.values())


def _nearest(found: Sequence[FoundChunk]) -> float:
    """The smallest distance; 0 if there is none, from which nothing is nearer."""
    return min((each.distance for each in found if each.distance is not None), default=0.0)
