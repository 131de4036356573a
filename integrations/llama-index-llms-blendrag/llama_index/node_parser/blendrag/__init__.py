"""``llama_index.llms.blendrag``' node parser, where LlamaIndex keeps its kind."""

from llama_index.llms.blendrag import BlendNodeParser

__all__ = ["BlendNodeParser"]
