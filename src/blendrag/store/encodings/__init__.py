"""How a layer's KV is stored: as it was computed, or with one byte per number and scales.

Scales are shared by the keys of one channel (per KV head, over the chunk's tokens), because channels
differ from one another far more than tokens do, and by the values of one token (per KV head, over
its channels), where it is the other way round (KIVI, arXiv:2402.02750, §3). Scales are stored first,
so that they are aligned wherever a layer is read to. Records of running states are kept as they are.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from blendrag.store.identity import NATIVE_ENCODING
from blendrag.store.kv import KVLayout

#: Encoding → largest error of a decoded number, relative to the largest one with the same scale: half
#: a step of 127 (int8).
RELATIVE_ERROR = {NATIVE_ENCODING: 0.0, "int8": 1 / 254}
ENCODINGS = tuple(RELATIVE_ERROR)

_NATIVE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}


class LayerPart(NamedTuple):
    """One tensor of a stored layer."""

    name: str
    """Suffix of the layer's name in the header."""
    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def stored_parts(layout: KVLayout, layer: int, tokens: int) -> tuple[LayerPart, ...]:
    """The parts of one layer in the order of their bytes; the numbers themselves come last."""
    shape = layout.layer_shape(layer, tokens)
    if layout.layers[layer].is_state:  # in every encoding
        return (LayerPart("", "U8", shape),)
    heads, width = layout.layers[layer].kv_heads, layout.layers[layer].head_dim
    key_scales = LayerPart(".key_scales", "F32", (heads, width))
    value_scales = LayerPart(".value_scales", "F32", (heads, tokens))
    if layout.encoding == "int8":
        key_middles = LayerPart(".key_middles", "F32", (heads, width))
        return key_scales, key_middles, value_scales, LayerPart("", "I8", shape)
    return (LayerPart("", _NATIVE[layout.dtype], shape),)


@lru_cache(maxsize=1024)
def stored_bytes_by_layer(layout: KVLayout, tokens: int) -> tuple[int, ...]:
    """Bytes of each layer at rest. Every request asks for those of each of its chunks."""
    return tuple(
        sum(part.size_bytes for part in stored_parts(layout, layer, tokens))
        for layer in range(len(layout.layers))
    )


def stored_chunk_bytes(layout: KVLayout, tokens: int) -> int:
    """Bytes of a chunk's KV at rest over all layers, without the header."""
    return sum(stored_bytes_by_layer(layout, tokens))
