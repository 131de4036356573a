"""``BlendVectorStore``: nodes with their vectors and their KV, added, changed and removed together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llama_index.core.indices.query.embedding_utils import get_top_k_mmr_embeddings
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from pydantic import model_validator

from blendrag.errors import InvalidInputError
from blendrag.frameworks.fields import CONFIG, EngineFields
from blendrag.frameworks.streaming import to_thread
from llama_index.llms.blendrag._filters import filter_of, naming_filters
from llama_index.llms.blendrag._nodes import CONTENT, accepts, to_entry, to_node

if TYPE_CHECKING:
    from llama_index.core.schema import BaseNode

    from blendrag.engine import BlendEngine
    from blendrag.engine.additions import AdditionProgress
    from blendrag.engine.library import Entry, Hit

#: Candidates of maximal marginal relevance per requested node, as in LlamaIndex.
MMR_PREFETCH = 4


class BlendVectorStore(EngineFields, BasePydanticVectorStore):
    """The corpus of a blendrag store as LlamaIndex's vector store.

    ``add`` computes the KV of new nodes, and ``delete`` drops it. So index methods (``insert``,
    ``refresh_ref_docs``, ``delete_ref_doc``) and every strategy of an ``IngestionPipeline`` with a docstore
    keep KV and vectors consistent. Everything is on disk when a method returns; ``persist`` does nothing.
    Chunks from ``blendrag ingest`` are found as well.

    By default, vectors are those of the corpus's own embedding model (:class:`BlendEmbedding`), whatever
    the index embeds with. ``embedding_name=`` keeps the index's vectors instead.

    Example:
        ```python
        pipeline = IngestionPipeline(
            transformations=[BlendNodeParser(**names), BlendEmbedding(**names)],
            vector_store=BlendVectorStore(**names),
            docstore=SimpleDocumentStore(),
            docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
        )
        ```
    """

    model_config = CONFIG

    stores_text: bool = True
    is_embedding_query: bool = False
    embedding_name: str | None = None
    """Name of the index's embedding model, whose vectors are stored; another name later is an error."""

    @model_validator(mode="after")
    def _choose_query(self) -> BlendVectorStore:
        self.is_embedding_query = self.embedding_name is not None
        return self

    @classmethod
    def class_name(cls) -> str:
        return "BlendVectorStore"

    @property
    def client(self) -> BlendEngine:
        return self.engine

    # -- changing -------------------------------------------------------------------------------

    def add(self, nodes: Sequence[BaseNode], *, wait: bool = True, **kwargs: Any) -> list[str]:
        """Add nodes, or replace those with the same ids; blocks until their KV is stored.

        With ``wait=False`` (``index.insert_nodes(nodes, wait=False)``) they are added on another thread, 16
        at a time: :attr:`indexing` tells how far that is, and :meth:`wait` waits for it. An error is raised
        there or by the next call that adds or deletes. Raises :class:`InvalidInputError`, and adds nothing,
        for metadata that is not JSON.
        """
        library, entries = self.engine.library, [to_entry(node) for node in nodes]
        embedder, vectors_of = self.embedding_name or "", None
        if self.embedding_name is not None:
            given = {node.node_id: node.get_embedding() for node in nodes}

            def vectors_of(batch: Sequence[Entry]) -> list[list[float]]:
                return [given[entry.id] for entry in batch]

        if wait:
            vectors = None if vectors_of is None else vectors_of(entries)
            library.add(entries, vectors, embedder=embedder)
        else:
            library.add_in_background(entries, vectors_of, embedder=embedder)
        return [entry.id for entry in entries]

    @property
    def indexing(self) -> AdditionProgress:
        """How many of the nodes are added that were given with ``wait=False``."""
        progress: AdditionProgress = self.engine.library.additions.progress
        return progress

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until these are added, or for so long; whether they are. Raises the error that ended it."""
        is_over: bool = self.engine.library.additions.wait(timeout_s)
        return is_over

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Remove a document's nodes, vectors and KV, if there are any."""
        self.engine.library.delete_parents([ref_doc_id])

    @naming_filters()
    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Remove the nodes with these ids that pass ``filters``, and their KV."""
        passing = filter_of(filters)
        if node_ids is None and passing is None:
            raise InvalidInputError(
                "delete_nodes got neither node_ids nor filters, expected one of them; clear() removes all"
            )
        library = self.engine.library
        chosen = library.entries(accepts(node_ids), filter=passing)
        library.delete([entry.id for entry in chosen])

    def clear(self) -> None:
        """Remove every node that was added by id, but no document that was ingested by path."""
        self.engine.library.clear()

    # -- reading --------------------------------------------------------------------------------

    @naming_filters()
    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Nodes with these ids, in this order, or all nodes, that pass ``filters``."""
        library, chosen = self.engine.library, filter_of(filters)
        if node_ids is None:
            return [_node_of(entry) for entry in library.entries(filter=chosen)]
        entries = library.get(node_ids)
        if chosen is not None:
            passing = {entry.id for entry in library.entries(accepts(node_ids), filter=chosen)}
            entries = [entry for entry in entries if entry.id in passing]
        return [_node_of(entry) for entry in entries]

    @naming_filters()
    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nearest nodes to the query's text or, with ``embedding_name``, to its vector.

        Raises :class:`InvalidInputError` for a mode other than ``default`` and ``mmr``.
        """
        if query.mode not in (VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR):
            raise InvalidInputError(
                f"query mode {query.mode.value!r} is not one of 'default', 'mmr'; for a search by words "
                "use BlendRetriever over the same store"
            )
        library = self.engine.library
        asked = self._asked(query)
        # an index over a store of texts passes an empty list for any ids
        where = accepts(query.node_ids or None, query.doc_ids or None)
        chosen = filter_of(query.filters)
        if query.mode == VectorStoreQueryMode.DEFAULT:
            hits = library.search(asked, query.similarity_top_k, where, filter=chosen)
        else:
            factor = kwargs.get("mmr_prefetch_factor") or MMR_PREFETCH
            wanted = kwargs.get("mmr_prefetch_k") or int(query.similarity_top_k * factor)
            vector = library.embed_query(asked) if isinstance(asked, str) else asked
            near = library.search(vector, wanted, where, filter=chosen)
            threshold = kwargs.get("mmr_threshold", query.mmr_threshold)
            hits = _diverse(vector, near, query.similarity_top_k, threshold)
        return VectorStoreQueryResult(
            nodes=[_node_of(hit.entry) for hit in hits],
            similarities=[hit.similarity for hit in hits],
            ids=[hit.entry.id for hit in hits],
        )

    def _asked(self, query: VectorStoreQuery) -> str | np.ndarray:
        if self.embedding_name is not None and query.query_embedding is not None:
            return np.asarray(query.query_embedding, np.float32)
        if self.embedding_name is None and query.query_str:
            return query.query_str
        wanted = "query_str" if self.embedding_name is None else "query_embedding"
        raise InvalidInputError(f"the query has no {wanted}, by which this store is searched")

    # -- without blocking the event loop --------------------------------------------------------

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        return await to_thread(self.add, nodes, **kwargs)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        await to_thread(self.delete, ref_doc_id, **delete_kwargs)

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        await to_thread(self.delete_nodes, node_ids, filters, **delete_kwargs)

    async def aclear(self) -> None:
        await to_thread(self.clear)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        return await to_thread(self.get_nodes, node_ids, filters)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return await to_thread(self.query, query, **kwargs)


def _node_of(entry: Entry) -> BaseNode:
    metadata, end = dict(entry.metadata), None
    if CONTENT not in metadata:  # a chunk of an ingested document
        _, end = metadata.pop("start", None), metadata.pop("end", None)
    source = entry.parent or entry.id
    return to_node(entry.text, metadata, id_=entry.id, source=source, start=entry.start, end=end)


def _diverse(asked: np.ndarray, near: list[Hit], top_k: int, threshold: float | None) -> list[Hit]:
    """The ``top_k`` of ``near`` by maximal marginal relevance."""
    if not near:
        return []
    by_place = dict(enumerate(near))
    _, chosen = get_top_k_mmr_embeddings(
        asked.tolist(),
        [hit.vector.tolist() for hit in near],
        similarity_top_k=top_k,
        embedding_ids=list(by_place),
        mmr_threshold=threshold,
    )
    return [by_place[place] for place in chosen]
