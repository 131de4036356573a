"""``BlendRetriever``: finds the chunks nearest to a question, whose KV is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field, field_validator

from blendrag import config
from blendrag.frameworks.fields import CONFIG, EngineFields
from blendrag.frameworks.streaming import to_thread
from langchain_blendrag._filters import filter_of

if TYPE_CHECKING:
    from blendrag.corpus.retriever import RetrievedChunk


class BlendRetriever(EngineFields, BaseRetriever):
    """Retrieves from the corpus of a blendrag store.

    Chunks are grouped by document, the nearest document first, and in reading order within it.
    ``page_content`` is the chunk's text and ``metadata`` the document's own plus ``source``,
    ``title``, ``start``, ``end``, ``chunk_id``, ``rank`` (1 is the best), ``score`` (what the ranking
    follows) and ``distance`` (L2, in [0, 2]; ``None`` in lexical search).

    Example:
        ```python
        retriever = BlendRetriever(model="Qwen/Qwen2.5-0.5B-Instruct", store="./kv", k=6)
        ```
    """

    model_config = CONFIG

    k: config.TopK | None = Field(default=None, alias="top_k")
    """``top_k``, as LangChain calls it."""
    search: config.Search | None = None
    """``hybrid``, ``dense`` or ``lexical``; ``None`` takes the engine's, by default ``hybrid``."""
    filter: Any = None
    """Which documents are searched: ``{"author": "Kim"}``, ``{"year": {"$gte": 2024}}`` or a
    ``blendrag.Filter``."""

    @field_validator("filter")
    @classmethod
    def _check_filter(cls, given: Any) -> Any:
        filter_of(given)
        return given

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun | None = None,
        k: int | None = None,
        filter: Any = None,
    ) -> list[Document]:
        return [to_document(chunk) for chunk in self._nearest(query, k, filter)]

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun | None = None,
        k: int | None = None,
        filter: Any = None,
    ) -> list[Document]:
        chunks = await to_thread(self._nearest, query, k, filter)
        return [to_document(chunk) for chunk in chunks]

    def _nearest(self, query: str, k: int | None, filter: Any) -> list[RetrievedChunk]:
        chunks: list[RetrievedChunk] = self.engine.retrieve(
            query,
            self.k if k is None else k,
            search=self.search,
            filter=filter_of(self.filter if filter is None else filter),
        )
        return chunks


def to_document(chunk: RetrievedChunk) -> Document:
    """``page_content`` is exactly the stored text, by which the LLM recognises the chunk."""
    metadata: dict[str, Any] = {
        **chunk.metadata,
        "source": chunk.source,
        "title": chunk.title,
        "start": chunk.start,
        "end": chunk.end,
        "chunk_id": chunk.chunk_id,
        "rank": chunk.rank,
        "score": chunk.score,
        "distance": chunk.distance,
    }
    if chunk.page is not None:
        metadata["page_label"] = chunk.page_label
    return Document(id=chunk.chunk_id, page_content=chunk.text, metadata=metadata)
