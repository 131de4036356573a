"""``BlendVectorStore``: documents with their vectors and their KV, added and deleted together.

One document is one chunk. LangChain's ``index(documents, record_manager, vector_store, cleanup=…)`` keeps
the KV of a changing corpus up to date.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from blendrag.errors import InvalidInputError
from blendrag.frameworks.engines import EngineArguments
from blendrag.frameworks.fields import EngineFields, check_keywords
from blendrag.option import refuse_unknown
from blendrag.signatures import shows
from blendrag.wording import a_type
from langchain_blendrag._filters import AnyFilter, filter_of

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine
    from blendrag.engine.additions import AdditionProgress
    from blendrag.engine.library import Entry, Hit, Library


class CorpusEmbeddings(Embeddings):
    """The corpus's embedding model as LangChain's Embeddings."""

    def __init__(self, fields: EngineFields) -> None:
        self._fields = fields

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Unit vectors of ``texts``."""
        vectors: list[list[float]] = self._fields.engine.library.embed(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The unit vector of a question."""
        vector: list[float] = self._fields.engine.library.embed_query(text).tolist()
        return vector


class BlendVectorStore(VectorStore):
    """Vectors in FAISS, texts and KV in the blendrag store.

    ``add_documents`` also precomputes the KV, which ``delete`` drops with the last document of the same
    text. Every document is one chunk: split documents first (:class:`BlendTextSplitter`).

    Args:
        embedding: LangChain's embeddings; by default the corpus's own embedding model.
        names: ``model``, ``store``, …, or ``engine``, as for :class:`ChatBlend`.

    Example:
        ```python
        store = BlendVectorStore(model="Qwen/Qwen2.5-0.5B-Instruct", store="./kv")
        store.add_documents(documents, ids=ids)
        retriever = store.as_retriever(search_kwargs={"k": 6})
        ```
    """

    @shows(EngineArguments)
    def __init__(
        self, embedding: Embeddings | None = None, **names: Unpack[EngineArguments]
    ) -> None:
        if isinstance(embedding, str):
            raise InvalidInputError(
                f"embedding is the text {embedding!r:.60}, expected LangChain's Embeddings; use model= or "
                "embedder= for names"
            )
        check_keywords(BlendVectorStore, names)
        self._fields, self._embedding = EngineFields(**names), embedding

    @property
    def engine(self) -> BlendEngine:
        """The given engine, or the shared one of these names. Creating it loads no model yet."""
        return self._fields.engine

    @property
    def embeddings(self) -> Embeddings:
        """The embedding model of documents and questions."""
        return self._embedding or CorpusEmbeddings(self._fields)

    @property
    def _library(self) -> Library:
        return self._fields.engine.library

    # -- adding and deleting --------------------------------------------------------------------

    def add_documents(
        self,
        documents: list[Document],
        *,
        ids: Sequence[str | None] | None = None,
        batch_size: int | None = None,
        precompute: bool = True,
        wait: bool = True,
        **kwargs: Any,
    ) -> list[str]:
        """Add ``documents``, replacing those with the same ids; returns the ids.

        Ids are those given, else the documents' own, else made of text and metadata, so adding the
        same document again changes nothing. ``batch_size`` documents (default: all) are added together
        or not at all. With ``precompute=False`` the KV is computed after a prompt first misses it.

        With ``wait=False`` they are added on another thread, 16 at a time unless ``batch_size`` says
        otherwise: :attr:`indexing` tells how far that is, and :meth:`wait` waits for it. An error is raised
        there or by the next call that adds or deletes.
        """
        known = ("ids", "batch_size", "precompute", "wait")
        refuse_unknown(kwargs, known, "an option of add_documents")
        if batch_size is not None and batch_size < 1:
            raise InvalidInputError(
                f"batch_size is {batch_size!r}, expected 1 or more; 16 is usual"
            )
        named = ids_of(documents, ids)
        entries = [to_entry(name, doc) for name, doc in zip(named, documents, strict=True)]
        library, size = self._library, batch_size or max(len(entries), 1)
        embedder = embedding_name(self._embedding)
        if not wait:
            more = {"at_a_time": batch_size} if batch_size else {}
            library.add_in_background(
                entries, self._vectors_of, embedder=embedder, precompute=precompute, **more
            )
            return named
        for start in range(0, len(entries), size):
            batch = entries[start : start + size]
            vectors = self._vectors_of(batch)
            library.add(batch, vectors, embedder=embedder, precompute=precompute)
        return named

    @property
    def indexing(self) -> AdditionProgress:
        """How many of the documents are added that were given with ``wait=False``."""
        return self._library.additions.progress

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until these are added, or for so long; whether they are. Raises the error that ended it."""
        return self._library.additions.wait(timeout_s)

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """:meth:`add_documents` for texts with metadata."""
        refuse_text("texts", texts)
        return super().add_texts(texts, metadatas, ids=ids, **kwargs)

    def _vectors_of(self, entries: Sequence[Entry]) -> np.ndarray | None:
        if self._embedding is None:
            return None
        texts = [entry.text for entry in entries]
        return np.asarray(self._embedding.embed_documents(texts), np.float32)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents with vectors and KV; without ``ids``, all that were added by id.

        Unknown ids are ignored.
        """
        refuse_text("ids", ids)
        if ids is None:
            self._library.clear()
        else:
            self._library.delete(ids)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Documents of these ids, in this order; unknown ids are left out."""
        refuse_text("ids", ids)
        return [to_document(entry) for entry in self._library.get(ids)]

    # -- creating and closing -------------------------------------------------------------------

    @classmethod
    @shows(EngineArguments)
    def from_texts(  # type: ignore[override]
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **names: Unpack[EngineArguments],
    ) -> BlendVectorStore:
        """A vector store of these names (``model``, ``store``, …), with ``texts`` added."""
        made = cls(embedding, **names)
        made.add_texts(texts, metadatas, ids=ids)
        return made

    @classmethod
    @shows(EngineArguments)
    def from_documents(  # type: ignore[override]
        cls,
        documents: list[Document],
        embedding: Embeddings | None = None,
        *,
        ids: list[str] | None = None,
        **names: Unpack[EngineArguments],
    ) -> BlendVectorStore:
        """A vector store of these names (``model``, ``store``, …), with ``documents`` added."""
        made = cls(embedding, **names)
        made.add_documents(documents, ids=ids)
        return made

    def close(self) -> None:
        """Close the shared engine of these names; a given engine stays open."""
        self._fields.close()

    def __enter__(self) -> BlendVectorStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- searching ------------------------------------------------------------------------------

    def similarity_search(
        self, query: str, k: int = 4, filter: AnyFilter | None = None, **kwargs: Any
    ) -> list[Document]:
        """The ``k`` documents nearest to ``query``, the nearest first."""
        _refuse_unread(kwargs)
        return [to_document(hit.entry) for hit in self._hits(query, k, filter)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: AnyFilter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """:meth:`similarity_search` with the L2 distance of unit vectors, in [0, 2]."""
        _refuse_unread(kwargs)
        return [(to_document(hit.entry), hit.distance) for hit in self._hits(query, k, filter)]

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: AnyFilter | None = None, **kwargs: Any
    ) -> list[Document]:
        """:meth:`similarity_search` for a vector."""
        _refuse_unread(kwargs)
        return [to_document(hit.entry) for hit in self._hits_by_vector(embedding, k, filter)]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: AnyFilter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """:meth:`max_marginal_relevance_search_by_vector` for a question."""
        _check_query(query)
        vector = self.embeddings.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(
            vector, k, fetch_k, lambda_mult, filter, **kwargs
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: AnyFilter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """``k`` diverse documents of the ``fetch_k`` nearest; ``lambda_mult=1`` ignores diversity."""
        known = ("k", "filter", "fetch_k", "lambda_mult")
        refuse_unknown(kwargs, known, "an option of this search")
        _check_k(k)
        _check_k(fetch_k)
        hits = self._hits_by_vector(embedding, max(fetch_k, k), filter)
        if not hits:
            return []
        chosen = maximal_marginal_relevance(
            np.asarray(embedding, np.float32), [hit.vector.tolist() for hit in hits], lambda_mult, k
        )
        return [to_document(hits[i].entry) for i in chosen]

    def _hits(self, query: str, k: int, filter: AnyFilter | None) -> list[Hit]:
        _check_query(query)
        if self._embedding is not None:
            return self._hits_by_vector(self._embedding.embed_query(query), k, filter)
        return self._search(query, k, filter)

    def _hits_by_vector(self, vector: list[float], k: int, filter: AnyFilter | None) -> list[Hit]:
        return self._search(np.asarray(vector, np.float32), k, filter)

    def _search(self, asked: str | np.ndarray, k: int, filter: AnyFilter | None) -> list[Hit]:
        _check_k(k)
        if callable(filter):
            accepts = filter
            return self._library.search(asked, k, lambda entry: bool(accepts(to_document(entry))))
        return self._library.search(asked, k, filter=filter_of(filter))

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """Cosine similarity, at least 0."""
        return lambda distance: max(0.0, 1.0 - distance**2 / 2)


# -- documents and entries ---------------------------------------------------------------------------


def ids_of(documents: Sequence[Document], ids: Sequence[str | None] | None) -> list[str]:
    refuse_text("ids", ids)
    other = next((doc for doc in documents if not isinstance(doc, Document)), None)
    if isinstance(documents, Document) or other is not None:
        found = documents if other is None else other
        raise InvalidInputError(
            f"documents hold {a_type(found)}, expected a list of Document; use add_texts for texts"
        )
    if ids is not None and len(ids) != len(documents):
        raise InvalidInputError(
            f"{len(ids)} ids for {len(documents)} documents, expected as many; or leave ids out"
        )
    given = [doc.id for doc in documents] if ids is None else ids
    return [name or _id_of(doc) for name, doc in zip(given, documents, strict=True)]


def _id_of(document: Document) -> str:
    """An id made of text and metadata, so that an app can add its documents at every start."""
    content = [document.page_content, document.metadata]
    return str(uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(content, sort_keys=True, default=str)))


def to_entry(name: str, document: Document) -> Entry:
    from blendrag.engine.library import Entry

    metadata = document.metadata
    title, start = metadata.get("title"), metadata.get("start_index")
    return Entry(
        id=name,
        text=document.page_content,
        metadata=metadata,
        title=title if isinstance(title, str) else "",
        start=start if isinstance(start, int) else 0,
    )


def to_document(entry: Entry) -> Document:
    return Document(id=entry.id, page_content=entry.text, metadata=dict(entry.metadata))


def embedding_name(embedding: Embeddings | None) -> str:
    """The name of an embedding model, which the corpus remembers."""
    if embedding is None:
        return ""
    kind = type(embedding)
    names = (getattr(embedding, name, None) for name in ("model", "model_name", "model_id"))
    model = next((name for name in names if isinstance(name, str)), "")
    return f"{kind.__module__}.{kind.__qualname__}" + (f":{model}" if model else "")


# -- checks ------------------------------------------------------------------------------------------


def refuse_text(name: str, given: Any) -> None:
    """Raise :class:`InvalidInputError` for a text instead of a list of texts."""
    if isinstance(given, str):
        raise InvalidInputError(
            f"{name} is the text {given!r:.40}, expected a list of texts; write [{given!r:.40}]"
        )


def _refuse_unread(options: dict[str, Any]) -> None:
    known = "expected k or filter, or search_type='similarity_score_threshold' for score_threshold"
    refuse_unknown(options, ("k", "filter"), "an option of this search", known)


def _check_k(k: Any) -> None:
    if not isinstance(k, int | np.integer) or k < 0:
        raise InvalidInputError(f"k is {k!r}, expected a whole number, 0 or more; 4 is usual")


def _check_query(query: Any) -> None:
    if not isinstance(query, str):
        raise InvalidInputError(
            f"the query {query!r:.60} is {a_type(query)}, expected a text; use a method that "
            "ends in _by_vector for a vector"
        )
