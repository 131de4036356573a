"""The response synthesizer of ``llama_index.llms.blendrag``, in LlamaIndex's namespace for it."""

from llama_index.llms.blendrag import BlendSynthesizer

__all__ = ["BlendSynthesizer"]
