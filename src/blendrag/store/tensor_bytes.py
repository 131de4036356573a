"""Tensor memory as plain buffers, so that bytes move without torch operators.

bfloat16 has no numpy dtype, so memory is addressed directly. The caller keeps a tensor alive while it uses
its buffer.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from blendrag.errors import InvalidInputError
from blendrag.store.kv import ITEM_BYTES

#: Stored dtypes by their names in keys and headers.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
#: ``[2, Hkv, T, D]``, or ``[1, Hkv, T, Dk+Dv]``.
Shape = tuple[int, int, int, int]


def buffer_at(address: int, size_bytes: int) -> Any:
    """A writable buffer over ``size_bytes`` at ``address``."""
    return (ctypes.c_ubyte * size_bytes).from_address(address)


def tensor_buffer(tensor: torch.Tensor) -> Any:
    """A buffer over a contiguous CPU tensor's bytes."""
    return buffer_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def target_buffers(out: torch.Tensor, shape: Shape, dtype: torch.dtype) -> list[memoryview]:
    """The memory of ``out`` (:data:`Shape`) in the order of a native layer's bytes.

    One buffer if ``out`` is contiguous, one per K/V if its heads are adjacent, otherwise one per
    head. Raises :class:`InvalidInputError` for a tensor that a layer cannot be read into.
    """
    if out.dtype != dtype or not out.is_cpu or tuple(out.shape) != shape:
        raise InvalidInputError(
            f"a layer was to be read into {tuple(out.shape)} {out.dtype} on {out.device}, "
            f"expected {shape} {dtype} on cpu; pass a view of that shape"
        )
    pieces, reach = _pieces(out.stride(), shape, dtype.itemsize)
    whole = memoryview(buffer_at(out.data_ptr(), reach)).cast("B")
    return [whole[at:end] for at, end in pieces]


@lru_cache(maxsize=256)
def _pieces(
    strides: tuple[int, ...], shape: Shape, item_bytes: int
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Begin and end of each piece, in bytes from the first number, and the largest end.

    Cached for all layers and chunks: computing it takes as long as a small read.
    """
    kinds, heads, tokens, width = shape  # K and V, or both in one
    kv_stride, head_stride, token_stride, item_stride = strides
    if (item_stride != 1 and width > 1) or (token_stride != width and tokens > 1):
        raise InvalidInputError(
            f"a layer was to be read into strides {strides}, expected each "
            f"[kv, head] to be contiguous [{tokens}, {width}]; do not transpose tokens and heads"
        )
    items = tokens * width
    if heads == 1 or head_stride == items:
        items *= heads
        begins = [kv * kv_stride for kv in range(kinds)]
        if kv_stride == items:
            begins, items = [0], kinds * items
    else:
        begins = [
            kv * kv_stride + head * head_stride for kv in range(kinds) for head in range(heads)
        ]
    pieces = tuple((begin * item_bytes, (begin + items) * item_bytes) for begin in begins)
    return pieces, max(end for _, end in pieces)
