"""Layers of a cache that append K and V in place.

transformers' layers concatenate, which copies all K and V for each decoded token. Here they are the beginning
of a larger buffer. A layer holds no other reference to it than ``keys`` and ``values``, so it may be copied
deeply or given other K and V at any time: it then gets another buffer with its next token. One that was cut
goes on in its buffer, over what was cut off; shallow copies would write over each other's tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionAndFullAttentionLayer


class _Growing(DynamicLayer):
    _buffers = (0, 0), (0, 0)
    """Addresses of the buffers of K and V, and the tokens for which they have room."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[B, Hkv, n, D]``. The first tokens are kept as transformers does."""
        if not self.get_seq_length():
            return super().update(key_states, value_states, *args, **kwargs)
        of_keys, of_values = self._buffers
        keys, of_keys = _appended(self.keys, key_states, of_keys)  # type: ignore[has-type]
        values, of_values = _appended(self.values, value_states, of_values)  # type: ignore[has-type]
        self.keys, self.values, self._buffers = keys, values, (of_keys, of_values)
        return keys, values


class GrowingLayer(_Growing):
    """A layer of attention."""


class GrowingStateLayer(_Growing, LinearAttentionAndFullAttentionLayer):
    """A layer that has running states, too."""


_GROWING: dict[type, type] = {
    DynamicLayer: GrowingLayer,
    LinearAttentionAndFullAttentionLayer: GrowingStateLayer,
}


def grow_in_place(cache: Cache) -> None:
    """Let those layers of ``cache`` that keep all tokens append in place."""
    for layer in getattr(cache, "layers", ()):
        layer.__class__ = _GROWING.get(type(layer), type(layer))


def _appended(
    held: torch.Tensor, fresh: torch.Tensor, buffer: tuple[int, int]
) -> tuple[torch.Tensor, tuple[int, int]]:
    """``held`` and then ``fresh``, and the buffer that they are the beginning of."""
    batch, heads, tokens, width = held.shape
    end = tokens + fresh.shape[2]
    address, room = buffer
    strides = (heads * room * width, room * width, width, 1)
    if held.data_ptr() == address and held.stride() == strides and end <= room:
        whole = held.as_strided((batch, heads, room, width), strides)
    else:
        room = end + max(64, end // 8)
        with torch.inference_mode(False):  # it is written in and outside inference mode
            whole = held.new_empty((batch, heads, room, width))
        whole[:, :, :tokens] = held
        address = whole.data_ptr()
    whole[:, :, tokens:end] = fresh
    return whole[:, :, :end], (address, room)
