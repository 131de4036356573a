"""What a model keeps per layer, read off a real prefill rather than its config."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from blendrag.errors import UnsupportedModelError
from blendrag.store.kv import DTYPES, KVLayout, LayerShape, dtype_name


def layout_of(cache: DynamicCache, layers: int, tokens: int, name: str) -> KVLayout:
    """Of ``cache``, which a prefill of ``tokens`` filled; ``layers`` and ``name`` are the model's.

    Raises :class:`UnsupportedModelError` for layers without K and V of their own, for K and V of different
    shapes, and for a dtype that is not stored.
    """
    if len(cache.layers) != layers:
        raise UnsupportedModelError(
            f"{name} keeps KV for {len(cache.layers)} of {layers} layers (shared or recurrent layers), "
            "which cannot be blended; use mode full"
        )
    shapes = []
    for i, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
            raise UnsupportedModelError(f"layer {i} of {name} keeps no KV; use mode full")
        if keys.shape != values.shape or keys.ndim != 4 or keys.shape[-2] != tokens:
            raise UnsupportedModelError(
                f"layer {i} of {name} keeps keys {tuple(keys.shape)} and values "
                f"{tuple(values.shape)}; blending needs the same shape for both; use mode full"
            )
        shapes.append(LayerShape(int(keys.shape[1]), int(keys.shape[3])))
    dtype = dtype_name(cache.layers[0].keys.dtype)
    if dtype not in DTYPES:
        raise UnsupportedModelError(
            f"KV of dtype {dtype} is not one of {sorted(DTYPES)}; use mode full"
        )
    return KVLayout(tuple(shapes), dtype)
