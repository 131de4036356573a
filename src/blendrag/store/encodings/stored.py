"""Layers as they are stored: checked and encoded on the way in, decoded on the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from blendrag.errors import InvalidInputError
from blendrag.store.encodings.int8 import Int8, Staging
from blendrag.store.identity import NATIVE_ENCODING
from blendrag.store.kv import ChunkKV, KVLayout
from blendrag.store.tensor_bytes import tensor_buffer

#: Dtype → integer types of its width, and the bits of infinity. Infinity and the NaNs are the largest
#: bit patterns of either sign: signed integers order the positive ones, unsigned the negative ones.
_INFINITY: dict[str, tuple[type[np.signedinteger[Any]], type[np.unsignedinteger[Any]], int]] = {
    "float32": (np.int32, np.uint32, 0x7F80_0000),
    "float16": (np.int16, np.uint16, 0x7C00),
    "bfloat16": (np.int16, np.uint16, 0x7F80),
}


def codec_of(layout: KVLayout) -> Int8 | None:
    """The codec of this layout; ``None`` for the native encoding."""
    return None if layout.encoding == NATIVE_ENCODING else Int8(layout)


def staging_of(layout: KVLayout, tokens: int) -> Staging | None:
    """The buffer that one chunk's layers are decoded from; ``None`` for the native encoding."""
    codec = codec_of(layout)
    return Staging(codec, tokens) if codec else None


def stored_layers(key: str, kv: ChunkKV) -> Iterator[torch.Tensor]:
    """Each layer as it is stored: checked, then encoded. One at a time, while it is in the cache.

    Raises :class:`InvalidInputError` for NaN and infinity.
    """
    codec = codec_of(kv.layout)
    for number, tensor in enumerate(kv.layers):
        layer = tensor.detach().cpu().contiguous()
        if not _all_finite(layer, kv.layout.dtype):
            raise InvalidInputError(
                f"KV {key[:12]}… has NaN or infinity in layer {number}, expected finite numbers; "
                "compute it in bfloat16 or float32, or leave this chunk out"
            )
        yield codec.encode(number, layer) if codec else layer


def _all_finite(layer: torch.Tensor, dtype: str) -> bool:
    """Whether a contiguous CPU tensor holds neither NaN nor infinity. Makes no copy."""
    signed, unsigned, infinity = _INFINITY[dtype]
    bits = np.frombuffer(tensor_buffer(layer), dtype=signed)
    negative_infinity = infinity | 1 << (8 * bits.itemsize - 1)
    return bool(bits.max() < infinity and bits.view(unsigned).max() < negative_infinity)
