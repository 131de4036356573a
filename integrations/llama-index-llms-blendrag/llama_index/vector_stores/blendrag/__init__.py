"""``llama_index.llms.blendrag``' vector store, where LlamaIndex keeps its kind."""

from llama_index.llms.blendrag import BlendVectorStore

__all__ = ["BlendVectorStore"]
