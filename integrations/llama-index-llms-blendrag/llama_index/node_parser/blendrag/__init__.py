"""The node parser of ``llama_index.llms.blendrag``, in LlamaIndex's namespace for it."""

from llama_index.llms.blendrag import BlendNodeParser

__all__ = ["BlendNodeParser"]
