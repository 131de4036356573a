"""From a question to the chunks to read, in reading order.

Chunks are chosen by L2 distance (CacheBlend §7.1). They are returned document by document, the nearest
document first, and in the document's order, so that "she" or "this city" follows what it refers to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import PurePath

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.embedder import Embedder, refuse_given
from blendrag.corpus.embedding_turns import Check, proceed
from blendrag.errors import InvalidInputError, check_unicode
from blendrag.text.readers import MetadataValue
from blendrag.wording import quoted


@dataclass(frozen=True)
class RetrievedChunk:
    """A chunk with its L2 distance from the question, in [0, 2]: smaller is nearer."""

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

    def retrieve(self, question: str, top_k: int, check: Check = proceed) -> list[RetrievedChunk]:
        """At most ``top_k`` different chunks, in reading order. ``check`` may raise to give up.

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
        if not isinstance(top_k, Integral) or top_k < 1:
            raise InvalidInputError(
                f"top_k is {quoted(top_k, 60)}, expected a whole number of 1 or more; 6 is usual"
            )
        if not self.corpus.has_documents:
            raise InvalidInputError(
                f"the corpus at {self.corpus.directory} holds no chunks; ingest first "
                "(blendrag ingest PATH…)"
            )
        if self.corpus.has_manifest:
            refuse_given(self.corpus.manifest.embedder)
        vector = self.embedder.embed_query(question, check=check)
        chunks = [
            RetrievedChunk(
                c.chunk_id, c.text, c.source, c.title, c.start, c.end, distance, c.metadata
            )
            for c, distance in self.corpus.nearest(vector, top_k)
        ]
        best: dict[str, float] = {}
        for chunk in chunks:
            best[chunk.source] = min(chunk.distance, best.get(chunk.source, chunk.distance))
        return sorted(chunks, key=lambda chunk: (best[chunk.source], chunk.source, chunk.start))
