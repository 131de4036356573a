"""The retriever of ``llama_index.llms.blendrag``, in LlamaIndex's namespace for it."""

from llama_index.llms.blendrag import BlendRetriever

__all__ = ["BlendRetriever"]
