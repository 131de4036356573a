"""``BlendVectorStore``: documents with their vectors and their KV, added and deleted together.

Owns LangChain's interface to the engine's library, where one document is one chunk. LangChain's own
``index(documents, record_manager, vector_store, cleanup=…)`` keeps KV in step with a changing corpus
through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from blendrag.errors import InvalidInputError
from blendrag.plugs.fields import EngineFields
from langchain_blendrag._documents import (
    CorpusEmbeddings,
    Filter,
    embedding_name,
    ids_of,
    refuse_options,
    refuse_text,
    to_document,
    to_entry,
    where_of,
)

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine
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


class BlendVectorStore(VectorStore):
    """Vectors in FAISS, texts and KV in the blendrag store beside them.

    ``add_documents(ids=…)`` also precomputes the KV, which ``delete`` drops with the last document of
    the same text. Documents are stored as they are, one chunk each: split them before
    (:class:`BlendTextSplitter`).

    Args:
        embedding: LangChain's embeddings to take vectors from; the corpus's own embedder otherwise.
        model, store, dtype, device, embedder, engine: as for :class:`ChatBlend`.

    Example:
        ```python
        store = BlendVectorStore(model="Qwen/Qwen2.5-0.5B-Instruct", store="./kv")
        store.add_documents(documents, ids=ids)
        retriever = store.as_retriever(search_kwargs={"k": 6})
        ```
    """

    def __init__(
        self,
        embedding: Embeddings | None = None,
        *,
        model: str | None = None,
        store: Path | str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        embedder: str | None = None,
        engine: BlendEngine | None = None,
    ) -> None:
        named: dict[str, Any] = {
            "model": model, "store": store, "dtype": dtype, "device": device,
            "embedder": embedder, "engine": engine,
        }  # fmt: skip
        self._fields = EngineFields(**{k: v for k, v in named.items() if v is not None})
        if isinstance(embedding, str):
            raise InvalidInputError(
                f"embedding is the text {embedding!r:.60}, expected LangChain's Embeddings; name a model "
                "as model=, an embedder as embedder="
            )
        self._embedding = embedding

    @property
    def engine(self) -> BlendEngine:
        """The engine given, or the shared one of these names. Making it loads no model yet."""
        return self._fields.engine

    @property
    def embeddings(self) -> Embeddings:
        """What documents and questions become vectors by."""
        return self._embedding or CorpusEmbeddings(self._fields)

    @property
    def _library(self) -> Library:
        return self.engine.library

    # -- keeping --------------------------------------------------------------------------------

    def add_documents(
        self,
        documents: list[Document],
        *,
        ids: Sequence[str | None] | None = None,
        batch_size: int | None = None,
        precompute: bool = True,
        **kwargs: Any,
    ) -> list[str]:
        """Add ``documents``, in place of those that had their ids; the ids.

        Ids are those given, else the documents' own, else made of text and metadata, so that adding
        the same document again changes nothing and costs a look-up. ``batch_size`` documents (all, if
        not given) are there together or not at all. ``precompute=False`` leaves the KV to be computed
        after a prompt first misses it.
        """
        refuse_options("add_documents", kwargs, "ids", "batch_size", "precompute")
        named = ids_of(documents, ids)
        size = batch_size or max(len(documents), 1)
        for start in range(0, len(documents), size):
            batch, names = documents[start : start + size], named[start : start + size]
            entries = [to_entry(name, doc) for name, doc in zip(names, batch, strict=True)]
            self._library.add(
                entries,
                self._vectors_of(batch),
                embedder=embedding_name(self._embedding),
                precompute=precompute,
            )
        return named

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """As :meth:`add_documents`, of texts with their metadata."""
        refuse_text("texts", texts)
        return super().add_texts(texts, metadatas, ids=ids, **kwargs)

    def _vectors_of(self, documents: Sequence[Document]) -> np.ndarray | None:
        if self._embedding is None:
            return None
        texts = [document.page_content for document in documents]
        return np.asarray(self._embedding.embed_documents(texts), np.float32)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Forget documents with their vectors and KV; without ``ids``, all that were added here.

        An id that is not there is no error.
        """
        refuse_text("ids", ids)
        if ids is None:
            self._library.clear()
        else:
            self._library.delete(ids)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Documents of these ids, in their order; those that are not there are left out."""
        refuse_text("ids", ids)
        return [to_document(entry) for entry in self._library.get(ids)]

    # -- finding --------------------------------------------------------------------------------

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
        hits = self._hits_by_vector(embedding, max(fetch_k, k), filter)
        if not hits:
            return []
        chosen = maximal_marginal_relevance(
            np.asarray(embedding, np.float32), [hit.vector.tolist() for hit in hits], lambda_mult, k
        )
        return [to_document(hits[i].entry) for i in chosen]

    def _hits(self, query: str, k: int, filter: Filter | None) -> list[Hit]:
        if not isinstance(query, str):
            raise InvalidInputError(
                f"the query {query!r:.60} is a {type(query).__name__}, expected a text; use "
                "similarity_search_by_vector for a vector"
            )
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

    # -- making and closing ---------------------------------------------------------------------

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> BlendVectorStore:
        """A vector store of ``kwargs`` (``model``, ``store``, …), with ``texts`` added."""
        made = cls(embedding, **kwargs)
        made.add_texts(texts, metadatas, ids=ids)
        return made

    @classmethod
    def from_documents(
        cls, documents: list[Document], embedding: Embeddings | None = None, **kwargs: Any
    ) -> BlendVectorStore:
        """A vector store of ``kwargs`` (``model``, ``store``, …), with ``documents`` added."""
        ids = kwargs.pop("ids", None)
        made = cls(embedding, **kwargs)
        made.add_documents(documents, ids=ids)
        return made

    def close(self) -> None:
        """Close the shared engine of these names; a given one is closed by who made it."""
        self._fields.close()

    def __enter__(self) -> BlendVectorStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
