"""The adapter round a Hugging Face causal LM: loading, structure, identity, encoding."""

from blendrag.model.adapter import ModelAdapter
from blendrag.model.loading import load_adapter

__all__ = ["ModelAdapter", "load_adapter"]
