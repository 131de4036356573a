"""``llama_index.llms.blendrag``' response synthesizer, where LlamaIndex keeps its kind."""

from llama_index.llms.blendrag import BlendSynthesizer

__all__ = ["BlendSynthesizer"]
