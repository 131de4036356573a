"""``BlendRetriever``: finds the chunks nearest to a question, whose KV is stored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters

from blendrag.config import OPTIONS, EngineOptions, SearchMode
from blendrag.frameworks.engines import check_given
from blendrag.frameworks.fields import EngineFields, check_keywords
from blendrag.frameworks.streaming import to_thread
from blendrag.signatures import shows
from llama_index.llms.blendrag._filters import filter_of, naming_filters
from llama_index.llms.blendrag._nodes import to_node

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from blendrag.corpus.retriever import RetrievedChunk
    from blendrag.engine import BlendEngine


class BlendRetriever(BaseRetriever):
    """Retrieves from the corpus of a blendrag store.

    Nodes are grouped by document, the nearest document first, and in reading order within it. ``score``
    is what the search ranks by; in hybrid search, the default, it is at most 1. Metadata is the document's
    own plus ``source``, ``title``, ``chunk_id`` and ``distance`` (L2, in [0, 2]; ``None`` in lexical
    search); it is not written into prompts or embedded unless a node's ``excluded_llm_metadata_keys`` is
    changed. Nodes from a :class:`BlendVectorStore` are returned as added.

    Args:
        model, store, options: names of the shared engine, as for :class:`BlendLLM`.
        engine: a ``BlendEngine``, instead of all these names.
        similarity_top_k: chunks to retrieve; ``None`` takes the engine's ``top_k``.
        search: ``hybrid``, ``dense`` or ``lexical``; ``None`` takes the engine's, by default ``hybrid``.
        filters: which documents are searched; all of LlamaIndex's operators, nested.
    """

    @shows(EngineOptions)
    def __init__(
        self,
        model: str | Path | PreTrainedModel | None = None,
        store: Path | str | None = None,
        *,
        engine: BlendEngine | None = None,
        similarity_top_k: int | None = None,
        search: SearchMode | None = None,
        filters: MetadataFilters | None = None,
        callback_manager: CallbackManager | None = None,
        verbose: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        check_keywords(BlendRetriever, options)
        OPTIONS["top_k"].check(similarity_top_k, "similarity_top_k")
        OPTIONS["search"].check(search)
        if engine is not None:
            check_given(engine, model=model, store=store, **options)
        self._engine = EngineFields(model=model, store=store, engine=engine, **options)
        self.similarity_top_k = similarity_top_k
        self.search = search
        self.filters = filters
        filter_of(filters)
        super().__init__(callback_manager=callback_manager, verbose=verbose)

    @property
    def engine(self) -> BlendEngine:
        """The given engine, or the shared one of these names. Creating it loads no model yet."""
        return self._engine.engine

    def close(self) -> None:
        """Close the shared engine of these names for all its wrappers; a given engine stays open."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @naming_filters()
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        chunks = self.engine.retrieve(
            query_bundle.query_str,
            self.similarity_top_k,
            search=self.search,
            filter=filter_of(self.filters),
        )
        return [node_with_score(chunk) for chunk in chunks]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await to_thread(self._retrieve, query_bundle)


def node_with_score(chunk: RetrievedChunk) -> NodeWithScore:
    """A chunk as a node."""
    metadata: dict[str, Any] = {
        **chunk.metadata,
        "source": chunk.source,
        "title": chunk.title,
        "chunk_id": chunk.chunk_id,
        "distance": chunk.distance,
    }
    if chunk.page is not None:
        metadata["page_label"] = chunk.page_label
    node = to_node(
        chunk.text,
        metadata,
        id_=chunk.chunk_id,
        source=chunk.source,
        start=chunk.start,
        end=chunk.end,
    )
    return NodeWithScore(node=node, score=chunk.score)
