"""Finding the decoder layers and attention modules of an unmodified Hugging Face causal LM.

Structure only, no names of models: the decoder stack is the module list with one entry per hidden
layer, an attention module is the child that carries ``layer_idx``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from blendrag.errors import UnsupportedModelError
from blendrag.model.compiled import unwrapped


@dataclass(frozen=True)
class DecoderStack:
    """The parts of a causal LM that blending touches."""

    base: nn.Module
    """The decoder without its LM head."""
    layers: Sequence[nn.Module]
    attentions: Sequence[nn.Module]
    rotary: nn.Module | None
    config: Any
    layer_types: Sequence[str]
    around: Sequence[nn.Module]
    """The model's modules that are in no decoder layer."""


def find_stack(model: Any) -> DecoderStack:
    """Locate the decoder stack, or raise :class:`UnsupportedModelError` saying what is missing."""
    config = model.config.get_text_config(decoder=True)
    base = getattr(model, "get_decoder", lambda: None)() or getattr(
        model, model.base_model_prefix, model
    )
    base = unwrapped(base)
    expected = config.num_hidden_layers
    layers = _layer_list(base, expected)
    if layers is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of {expected} decoder layers to hook; use mode full"
        )
    attentions = [_attention(layer, i) for i, layer in enumerate(layers)]
    for i, attention in enumerate(attentions):
        if attention is None:
            raise UnsupportedModelError(
                f"layer {i} of {type(model).__name__} ({type(layers[i]).__name__}) is not an attention "
                "layer, so there is no KV to reuse; use mode full"
            )
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * expected)
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"{type(model).__name__} has layers of type {kind!r}; only full and sliding-window "
                "attention can be blended; use mode full"
            )
    found = [a for a in attentions if a is not None]
    rotary = getattr(base, "rotary_emb", None)
    inside = {id(module) for layer in layers for module in layer.modules()}
    around = [module for module in model.modules() if id(module) not in inside]
    return DecoderStack(base, layers, found, rotary, config, types, around)


def _layer_list(base: nn.Module, expected: int) -> list[nn.Module] | None:
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == expected:
            return [unwrapped(layer) for layer in module]
    return None


def _attention(layer: nn.Module, index: int) -> nn.Module | None:
    for child in layer.children():
        if getattr(child, "layer_idx", None) == index and hasattr(child, "config"):
            return child
    return None
