"""The parts a stored layer consists of, by encoding, and the bytes they take.

Owns names and shapes, which the payload's header is made of; no numbers, and no torch. What shares a
scale: the keys of one channel (per KV head, over the chunk's tokens), as channels differ from one
another far more than tokens do, and the values of one token (per KV head, over its channels), as
they do not (KIVI, §3). Scales come first, so that they are aligned wherever a layer is read to.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from blendrag.store.identity import NATIVE_ENCODING
from blendrag.store.kv import KVLayout

#: Encodings by name → largest error of a decoded number, relative to the largest one that shares its
#: scale: half a step of 127 (int8), half of the last of three mantissa bits (fp8).
RELATIVE_ERROR = {NATIVE_ENCODING: 0.0, "int8": 1 / 254, "fp8": 1 / 16}
ENCODINGS = tuple(RELATIVE_ERROR)

_NATIVE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "F8_E4M3": 1}


class Part(NamedTuple):
    """One tensor of a stored layer."""

    name: str
    """What stands behind the layer's own name in the header."""
    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def stored_parts(layout: KVLayout, layer: int, tokens: int) -> tuple[Part, ...]:
    """The parts of one layer in the order of their bytes, the numbers themselves last."""
    shape = layout.layer_shape(layer, tokens)
    _, heads, _, width = shape
    key_scales = Part(".key_scales", "F32", (heads, width))
    value_scales = Part(".value_scales", "F32", (heads, tokens))
    if layout.encoding == "int8":
        key_middles = Part(".key_middles", "F32", (heads, width))
        return key_scales, key_middles, value_scales, Part("", "I8", shape)
    if layout.encoding == "fp8":
        return key_scales, value_scales, Part("", "F8_E4M3", shape)
    return (Part("", _NATIVE[layout.dtype], shape),)


def stored_layer_bytes(layout: KVLayout, layer: int, tokens: int) -> int:
    """Bytes of one layer at rest."""
    return sum(part.size_bytes for part in stored_parts(layout, layer, tokens))


def stored_chunk_bytes(layout: KVLayout, tokens: int) -> int:
    """Bytes of a chunk's KV at rest over all layers, headers excluded."""
    return sum(stored_layer_bytes(layout, i, tokens) for i in range(len(layout.layers)))
