"""``BlendEmbedding``: the embedding model of blendrag's corpus for indexes and pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_index.core.base.embeddings.base import BaseEmbedding

from blendrag.frameworks.fields import CONFIG, EngineFields
from blendrag.frameworks.streaming import to_thread

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import Embedding


class BlendEmbedding(EngineFields, BaseEmbedding):
    """Embeds like the corpus of the store: long texts by windows. Does not load the language model.

    For use with a :class:`BlendVectorStore`: LlamaIndex gives a vector store only nodes with embeddings.

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
