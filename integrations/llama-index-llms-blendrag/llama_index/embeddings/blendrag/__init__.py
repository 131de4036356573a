"""The embedding model of ``llama_index.llms.blendrag``, in LlamaIndex's namespace for it."""

from llama_index.llms.blendrag import BlendEmbedding

__all__ = ["BlendEmbedding"]
