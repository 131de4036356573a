"""How far back tokens see in a layer: everywhere, within a sliding window, or within their run of tokens.

Chunked attention (Llama 4) divides a sequence into runs of ``attention_chunk_size`` tokens, and a token sees
those of its own run. transformers passes sliding windows to attention functions, but not these runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

Position = TypeVar("Position", int, torch.Tensor)

#: Types of layers whose windows are known.
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


class Window(NamedTuple):
    """A token sees the last ``tokens`` tokens, itself included, or those of its own run of so many."""

    tokens: int
    is_run: bool = False

    def first_seen(self, position: Position) -> Position:
        """The first position that a token sees, or one below 0."""
        if self.is_run:
            return position // self.tokens * self.tokens
        return position - self.tokens + 1


def window_of_type(config: Any, layer_type: str) -> Window | None:
    """The window of layers of this type in a model with this text config."""
    if layer_type == "chunked_attention":
        return Window(config.attention_chunk_size, is_run=True)
    tokens = getattr(config, "sliding_window", None)
    return Window(int(tokens)) if tokens and layer_type == "sliding_attention" else None


def window_of(attention: nn.Module, sliding_window: int | None) -> Window | None:
    """The window of a layer's ``attention``, which passes ``sliding_window`` to its attention function."""
    if sliding_window is not None:
        return Window(sliding_window)
    config: Any = getattr(attention, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[attention.layer_idx] == "chunked_attention":
        return window_of_type(config, "chunked_attention")
    return None
