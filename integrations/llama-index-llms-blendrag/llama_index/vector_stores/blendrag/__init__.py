"""The vector store of ``llama_index.llms.blendrag``, in LlamaIndex's namespace for it."""

from llama_index.llms.blendrag import BlendVectorStore

__all__ = ["BlendVectorStore"]
