"""``BlendEmbedding``: the embedding model of blendrag's corpus, for LlamaIndex's indexes and pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_index.core.base.embeddings.base import BaseEmbedding

from blendrag.frameworks.fields import CONFIG, EngineFields
from blendrag.frameworks.shared import to_thread

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import Embedding


class BlendEmbedding(EngineFields, BaseEmbedding):
    """Embeds as the corpus beside the store does: long texts whole, by windows. Needs no other service.

    LlamaIndex hands a node to a vector store only when it has an embedding; this one is at hand wherever
    a :class:`BlendVectorStore` is. Does not load the language model.

    Example:
        ```python
        index = VectorStoreIndex.from_vector_store(
            BlendVectorStore(**names), embed_model=BlendEmbedding(**names)
        )
        ```
    """

    model_config = CONFIG

    @classmethod
    def class_name(cls) -> str:
        return "BlendEmbedding"

    def _get_query_embedding(self, query: str) -> Embedding:
        return self._floats(self.engine.library.embed_query(query))

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return await to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> Embedding:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return [self._floats(row) for row in self.engine.library.embed(texts)]

    async def _aget_text_embedding(self, text: str) -> Embedding:
        return await to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return await to_thread(self._get_text_embeddings, texts)

    @staticmethod
    def _floats(vector: object) -> Embedding:
        return [float(x) for x in vector]  # type: ignore[attr-defined]
