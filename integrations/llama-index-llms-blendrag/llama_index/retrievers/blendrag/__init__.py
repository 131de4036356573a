"""``llama_index.llms.blendrag``' retriever, where LlamaIndex keeps its kind."""

from llama_index.llms.blendrag import BlendRetriever

__all__ = ["BlendRetriever"]
