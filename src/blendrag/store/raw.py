"""Tensor memory as plain buffers, so that bytes move without torch operators.

Owns pointer arithmetic over CPU tensors and nothing else. bfloat16 has no numpy dtype and torch
operators in a loader thread would start a second OpenMP team, so memory is addressed directly.
The caller keeps the tensor alive for as long as it uses a buffer.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from blendrag.errors import InvalidInputError

#: Dtypes by stored name → integers of their width, and the bits of infinity. Of either sign, infinity
#: and the NaNs are the largest patterns there are: signed integers order the positive, unsigned the rest.
_INFINITY: dict[str, tuple[type[np.signedinteger[Any]], type[np.unsignedinteger[Any]], int]] = {
    "float32": (np.int32, np.uint32, 0x7F80_0000),
    "float16": (np.int16, np.uint16, 0x7C00),
    "bfloat16": (np.int16, np.uint16, 0x7F80),
}


def buffer_at(address: int, size_bytes: int) -> Any:
    """A writable buffer over ``size_bytes`` at ``address``."""
    return (ctypes.c_ubyte * size_bytes).from_address(address)


def tensor_buffer(tensor: torch.Tensor) -> Any:
    """A buffer over a contiguous CPU tensor's bytes."""
    return buffer_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def on_cpu(layer: torch.Tensor) -> torch.Tensor:
    """``layer`` itself where it is contiguous CPU memory, otherwise a copy that is."""
    if layer.device.type == "cpu" and layer.is_contiguous():
        return layer
    return layer.detach().cpu().contiguous()


def check_target(out: torch.Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Raise :class:`InvalidInputError` for a tensor that a layer cannot be read into."""
    if tuple(out.shape) != shape or out.dtype != dtype or not out.is_cpu:
        raise InvalidInputError(
            f"a layer was to be read into {tuple(out.shape)} {out.dtype} on {out.device}, "
            f"expected {shape} {dtype} on cpu; pass a view of that shape"
        )
    _, _, tokens, width = shape
    _, _, token_stride, item_stride = out.stride()
    if (item_stride != 1 and width > 1) or (token_stride != width and tokens > 1):
        raise InvalidInputError(
            f"a layer was to be read into strides {tuple(out.stride())}, expected each "
            f"[kv, head] to be contiguous [{tokens}, {width}]; do not transpose tokens and heads"
        )


def pieces(
    out: torch.Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> list[tuple[int, int]]:
    """``(address, bytes)`` of ``out`` ``[2, Hkv, T, D]`` in the order of a native layer's bytes.

    One piece where ``out`` is contiguous, one per K/V where its heads are adjacent, otherwise one
    per head. Raises :class:`InvalidInputError` for a tensor that a layer cannot be read into.
    """
    check_target(out, shape, dtype)
    _, heads, tokens, width = shape
    kv_stride, head_stride, _, _ = out.stride()
    item = out.element_size()
    base = out.data_ptr()
    head_bytes = tokens * width * item
    if heads == 1 or head_stride == tokens * width:
        if kv_stride == heads * tokens * width:
            return [(base, 2 * heads * head_bytes)]
        return [(base, heads * head_bytes), (base + kv_stride * item, heads * head_bytes)]
    return [
        (base + (kv * kv_stride + head * head_stride) * item, head_bytes)
        for kv in (0, 1)
        for head in range(heads)
    ]


def all_finite(layer: torch.Tensor, dtype: str) -> bool:
    """Whether a contiguous CPU tensor holds neither NaN nor infinity. Makes no copy."""
    signed, unsigned, infinity = _INFINITY[dtype]
    bits = np.frombuffer(tensor_buffer(layer), dtype=signed)
    negative_infinity = infinity | 1 << (8 * bits.itemsize - 1)
    return bool(bits.max() < infinity and bits.view(unsigned).max() < negative_infinity)
