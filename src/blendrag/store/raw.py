"""Tensor memory as plain buffers, so that bytes move without torch operators.

Owns pointer arithmetic over CPU tensors and nothing else. bfloat16 has no numpy dtype and torch
operators in a loader thread would start a second OpenMP team, so memory is addressed directly.
The caller keeps the tensor alive for as long as it uses a buffer.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
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

#: ``[2, Hkv, T, D]``.
Shape = tuple[int, int, int, int]
#: Begin and end of every piece, in bytes from the first number, and where the last one of them ends.
Places = tuple[tuple[tuple[int, int], ...], int]


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


def check_target(out: torch.Tensor, shape: Shape, dtype: torch.dtype) -> None:
    """Raise :class:`InvalidInputError` for a tensor that a layer cannot be read into."""
    _places(out, shape, dtype)


def pieces(out: torch.Tensor, shape: Shape, dtype: torch.dtype) -> list[tuple[int, int]]:
    """``(address, bytes)`` of ``out`` ``[2, Hkv, T, D]`` in the order of a native layer's bytes.

    One piece where ``out`` is contiguous, one per K/V where its heads are adjacent, otherwise one
    per head. Raises :class:`InvalidInputError` for a tensor that a layer cannot be read into.
    """
    begin, (places, _) = out.data_ptr(), _places(out, shape, dtype)
    return [(begin + at, end - at) for at, end in places]


def target_buffers(out: torch.Tensor, shape: Shape, dtype: torch.dtype) -> list[memoryview]:
    """What :func:`pieces` are, as writable buffers: one cut up, which is faster than one made of each."""
    places, reach = _places(out, shape, dtype)
    whole = memoryview(buffer_at(out.data_ptr(), reach)).cast("B")
    return [whole[at:end] for at, end in places]


def _places(out: torch.Tensor, shape: Shape, dtype: torch.dtype) -> Places:
    if out.dtype != dtype or not out.is_cpu:
        raise _wrong_target(tuple(out.shape), out.dtype, out.device, shape, dtype)
    return _found(out.shape, out.stride(), shape, dtype)


@lru_cache(maxsize=256)
def _found(
    given: tuple[int, ...], strides: tuple[int, ...], shape: Shape, dtype: torch.dtype
) -> Places:
    """Of a CPU tensor; found once for all layers and chunks, which would take as long as a small read."""
    if tuple(given) != shape:
        raise _wrong_target(tuple(given), dtype, "cpu", shape, dtype)
    _, heads, tokens, width = shape
    kv_stride, head_stride, token_stride, item_stride = strides
    if (item_stride != 1 and width > 1) or (token_stride != width and tokens > 1):
        raise InvalidInputError(
            f"a layer was to be read into strides {strides}, expected each "
            f"[kv, head] to be contiguous [{tokens}, {width}]; do not transpose tokens and heads"
        )
    items = tokens * width
    if heads == 1 or head_stride == items:
        items *= heads
        begins = [0, kv_stride]
        if kv_stride == items:
            begins, items = [0], 2 * items
    else:
        begins = [kv * kv_stride + head * head_stride for kv in (0, 1) for head in range(heads)]
    size = dtype.itemsize
    places = tuple((begin * size, (begin + items) * size) for begin in begins)
    return places, max(end for _, end in places)


def _wrong_target(
    given: tuple[int, ...], given_dtype: object, device: object, shape: Shape, dtype: object
) -> InvalidInputError:
    return InvalidInputError(
        f"a layer was to be read into {given} {given_dtype} on {device}, "
        f"expected {shape} {dtype} on cpu; pass a view of that shape"
    )


def all_finite(layer: torch.Tensor, dtype: str) -> bool:
    """Whether a contiguous CPU tensor holds neither NaN nor infinity. Makes no copy."""
    signed, unsigned, infinity = _INFINITY[dtype]
    bits = np.frombuffer(tensor_buffer(layer), dtype=signed)
    negative_infinity = infinity | 1 << (8 * bits.itemsize - 1)
    return bool(bits.max() < infinity and bits.view(unsigned).max() < negative_infinity)
