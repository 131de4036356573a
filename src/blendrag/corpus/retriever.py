"""From a question to the chunks to read, in reading order.

Chunks are chosen by L2 distance (CacheBlend §7.1). They are returned document by document, the nearest
document first, and in the document's order, so that "she" or "this city" follows what it refers to.

In a conversation a question may go on with the one before ("And when was it built?") or change the topic.
Both are searched for, the question alone and the two together, and chunks are taken from the results in turn.
The question alone comes first, unless the two together have a hit that is clearly nearer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import PurePath

from blendrag.config import OPTIONS
from blendrag.corpus.corpus import Corpus, StoredChunk
from blendrag.corpus.embedder import Embedder, refuse_given
from blendrag.corpus.embedding_turns import Check, proceed
from blendrag.errors import InvalidInputError, check_unicode
from blendrag.text.readers import MetadataValue
from blendrag.wording import quoted

#: A question goes on with the one before if the two together are nearer to a chunk than this share of the
#: distance of the question alone. Chosen on the demo's corpora: most questions such as "And how wide is it?"
#: are below, and few questions that change the topic.
FOLLOW_UP_DISTANCE = 0.88

NearChunk = tuple[StoredChunk, float]


@dataclass(frozen=True)
class RetrievedChunk:
    """A chunk with its L2 distance from the question, in [0, 2]: smaller is nearer. In a conversation it is
    the distance from the question with the one before, if that is less."""

    chunk_id: str
    text: str
    source: str
    title: str
    start: int
    end: int
    distance: float
    metadata: Mapping[str, MetadataValue]

    @property
    def file_name(self) -> str:
        """The last part of its source."""
        return PurePath(self.source).name

    @property
    def score(self) -> float:
        """Cosine similarity to the question, in [-1, 1]: larger is nearer."""
        return 1 - self.distance**2 / 2


class Retriever:
    def __init__(self, corpus: Corpus, embedder: Embedder) -> None:
        self.corpus = corpus
        self.embedder = embedder

    def retrieve(
        self, question: str, top_k: int, check: Check = proceed, earlier: str = ""
    ) -> list[RetrievedChunk]:
        """At most ``top_k`` different chunks, in reading order. ``check`` may raise to give up. ``earlier``:
        the question before it in a conversation.

        Raises :class:`InvalidInputError` for an empty question, an empty corpus or ``top_k`` < 1.
        """
        if not isinstance(question, str):
            raise InvalidInputError(
                f"the question {quoted(question, 60)} is a {type(question).__name__}, expected a "
                "text; ask in words"
            )
        if not question.strip():
            raise InvalidInputError("the question is empty, expected some words; ask something")
        check_unicode(question, "the question")
        OPTIONS["top_k"].check(top_k)
        if not self.corpus.has_documents:
            raise InvalidInputError(
                f"the corpus at {self.corpus.directory} holds no chunks; ingest first "
                "(blendrag ingest PATH…)"
            )
        if self.corpus.has_manifest:
            refuse_given(self.corpus.manifest.embedder)
        searches = [question, f"{earlier}\n{question}"] if earlier.strip() else [question]
        vectors = self.embedder.embed_queries(searches, check=check)
        hits = [self.corpus.nearest(vector, top_k) for vector in vectors]
        chunks = [
            RetrievedChunk(
                c.chunk_id, c.text, c.source, c.title, c.start, c.end, distance, c.metadata
            )
            for c, distance in (hits[0] if len(hits) == 1 else _merged(hits[0], hits[1], top_k))
        ]
        best: dict[str, float] = {}
        for chunk in chunks:
            best[chunk.source] = min(chunk.distance, best.get(chunk.source, chunk.distance))
        return sorted(chunks, key=lambda chunk: (best[chunk.source], chunk.source, chunk.start))


def _merged(
    alone: Sequence[NearChunk], together: Sequence[NearChunk], top_k: int
) -> list[NearChunk]:
    """The first ``top_k`` different chunks of both searches in turn, each with its smaller distance."""
    goes_on = bool(alone and together) and together[0][1] < FOLLOW_UP_DISTANCE * alone[0][1]
    first, second = (together, alone) if goes_on else (alone, together)
    merged: dict[str, NearChunk] = {}
    for hit in chain.from_iterable(zip_longest(first, second)):
        if hit is not None and (hit[0].chunk_id in merged or len(merged) < top_k):
            known = merged.setdefault(hit[0].chunk_id, hit)
            merged[hit[0].chunk_id] = hit if hit[1] < known[1] else known
    return list(merged.values())
