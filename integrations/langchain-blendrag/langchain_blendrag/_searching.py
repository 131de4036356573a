"""Searching the engine's library in LangChain's ways: by text, by vector, with scores, for diversity.

Does not know how documents come there.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from blendrag.errors import InvalidInputError
from blendrag.frameworks.fields import EngineFields
from langchain_blendrag._documents import (
    CorpusEmbeddings,
    Filter,
    refuse_options,
    to_document,
    where_of,
)

if TYPE_CHECKING:
    from blendrag.engine.library import Hit, Library

_MMR_OPTIONS = ("k", "filter", "fetch_k", "lambda_mult")


def _refuse_unread(options: dict[str, Any]) -> None:
    refuse_options(
        "this search", options, "k", "filter",
        "or search_type='similarity_score_threshold' for score_threshold",
    )  # fmt: skip


def _check_k(k: Any) -> None:
    if not isinstance(k, int | np.integer) or k < 0:
        raise InvalidInputError(f"k is {k!r}, expected a whole number, 0 or more; 4 is usual")


def _check_query(query: Any) -> None:
    if not isinstance(query, str):
        raise InvalidInputError(
            f"the query {query!r:.60} is a {type(query).__name__}, expected a text; use a method that "
            "ends in _by_vector for a vector"
        )


class SearchableStore(VectorStore, ABC):
    """The part of :class:`BlendVectorStore` that finds."""

    def __init__(self, fields: EngineFields, embedding: Embeddings | None) -> None:
        self._fields = fields
        self._embedding = embedding

    @property
    def embeddings(self) -> Embeddings:
        """What documents and questions become vectors by."""
        return self._embedding or CorpusEmbeddings(self._fields)

    @property
    def _library(self) -> Library:
        return self._fields.engine.library

    def similarity_search(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """The ``k`` documents nearest to ``query``, the nearest first."""
        _refuse_unread(kwargs)
        return [to_document(hit.entry) for hit in self._hits(query, k, filter)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """As :meth:`similarity_search`, with the L2 distance of unit vectors: in [0, 2], 0 is equal."""
        _refuse_unread(kwargs)
        return [(to_document(hit.entry), hit.distance) for hit in self._hits(query, k, filter)]

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """As :meth:`similarity_search`, from a vector."""
        _refuse_unread(kwargs)
        return [to_document(hit.entry) for hit in self._hits_by_vector(embedding, k, filter)]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """``k`` of the ``fetch_k`` nearest that repeat one another little; 1 looks at nearness alone."""
        refuse_options("this search", kwargs, *_MMR_OPTIONS)
        _check_query(query)
        vector = self.embeddings.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(
            vector, k, fetch_k, lambda_mult, filter=filter
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """:meth:`max_marginal_relevance_search` from a vector."""
        refuse_options("this search", kwargs, *_MMR_OPTIONS)
        _check_k(k)
        _check_k(fetch_k)
        hits = self._hits_by_vector(embedding, max(fetch_k, k), filter)
        if not hits:
            return []
        chosen = maximal_marginal_relevance(
            np.asarray(embedding, np.float32), [hit.vector.tolist() for hit in hits], lambda_mult, k
        )
        return [to_document(hits[i].entry) for i in chosen]

    def _hits(self, query: str, k: int, filter: Filter | None) -> list[Hit]:
        _check_query(query)
        if self._embedding is not None:
            return self._hits_by_vector(self._embedding.embed_query(query), k, filter)
        _check_k(k)
        return self._library.search(query, k, where=where_of(filter))

    def _hits_by_vector(self, vector: list[float], k: int, filter: Filter | None) -> list[Hit]:
        _check_k(k)
        return self._library.search(np.asarray(vector, np.float32), k, where=where_of(filter))

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """Cosine similarity, nothing below 0."""
        return lambda distance: max(0.0, 1.0 - distance**2 / 2)
