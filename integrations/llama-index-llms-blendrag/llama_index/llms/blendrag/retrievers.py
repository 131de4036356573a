"""``BlendRetriever``: the chunks nearest to a question, as the texts whose KV is stored."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import (
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)

from blendrag.errors import InvalidInputError
from blendrag.plugs.shared import choose_engine

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine
    from blendrag.retriever.retriever import RetrievedChunk


class BlendRetriever(BaseRetriever):
    """Retrieves from the corpus beside a blendrag store.

    Nodes come document by document, the nearest first, and within one in reading order; ``score`` is
    the cosine similarity. Metadata is the document's own plus ``source``, ``title``, ``chunk_id``
    and ``distance`` (L2, in [0, 2]); none of it is written into prompts or embedded unless a node's
    ``excluded_llm_metadata_keys`` is changed.

    Args:
        model, store, dtype, device, embedder: whose engine to use; shared with every wrapper of
            these names. ``embedder`` is that of a corpus yet to be ingested.
        engine: a ``BlendEngine``, instead of all these names.
        similarity_top_k: chunks to retrieve; ``None`` takes the engine's ``top_k``.
    """

    def __init__(
        self,
        model: str | None = None,
        store: Path | str | None = None,
        *,
        dtype: str | None = None,
        device: str | None = None,
        embedder: str | None = None,
        engine: BlendEngine | None = None,
        similarity_top_k: int | None = None,
        callback_manager: CallbackManager | None = None,
        verbose: bool = False,
    ) -> None:
        if similarity_top_k is not None and similarity_top_k < 1:
            raise InvalidInputError(
                f"similarity_top_k is {similarity_top_k}, expected 1 or more; 6 is usual"
            )
        self.engine = choose_engine(
            engine, model=model, store=store, dtype=dtype, device=device, embedder=embedder
        )
        self.similarity_top_k = similarity_top_k
        super().__init__(callback_manager=callback_manager, verbose=verbose)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        chunks = self.engine.retrieve(query_bundle.query_str, self.similarity_top_k)
        return [to_node(chunk) for chunk in chunks]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


def to_node(chunk: RetrievedChunk) -> NodeWithScore:
    """``text`` is exactly the stored text: it is what the LLM recognises a chunk by."""
    metadata: dict[str, Any] = {
        **chunk.metadata,
        "source": chunk.source,
        "title": chunk.title,
        "chunk_id": chunk.chunk_id,
        "distance": chunk.distance,
    }
    node = TextNode(
        id_=chunk.chunk_id,
        text=chunk.text,
        metadata=metadata,
        start_char_idx=chunk.start,
        end_char_idx=chunk.end,
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=chunk.source)},
        excluded_llm_metadata_keys=list(metadata),
        excluded_embed_metadata_keys=list(metadata),
    )
    return NodeWithScore(node=node, score=1 - chunk.distance**2 / 2)
