"""``llama_index.llms.blendrag``' embedding model, where LlamaIndex keeps its kind."""

from llama_index.llms.blendrag import BlendEmbedding

__all__ = ["BlendEmbedding"]
