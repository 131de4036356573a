"""``BlendCache``: a stock ``DynamicCache`` whose first forward is blended.

It owns the prompt's KV buffers. During the blended forward ``update`` hands new K/V to the pack, afterwards
it writes into headroom instead of concatenating. Every layer keeps all its tokens; windows are masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from blendrag.model.windows import Window
from blendrag.store.kv import KVLayout, LayerShape

#: Buffers of consecutive layers are allocated together up to this size, and their keys rotated together. On a
#: CPU they stay in its cache, and below what glibc's malloc keeps; on a GPU each operation costs a launch.
GROUP_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}

Merge = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


class BlendLayer(DynamicLayer):
    """One layer's K and V as views of a buffer ``[2, 1, Hkv, capacity, D]``
    (:class:`~blendrag.store.kv.LayerShape`)."""

    is_sliding = False

    def __init__(self, buffer: torch.Tensor, shape: LayerShape) -> None:
        self.length = 0
        """Tokens of :attr:`buffer` that are the cache's content."""
        self._replaced: list[torch.Tensor | None] = [None, None]
        """K and V that transformers put in their place."""
        self._shape = shape
        self._keep_in(buffer)
        super().__init__()
        self.dtype, self.device = buffer.dtype, buffer.device
        self.is_initialized = True

    def _keep_in(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        with torch.inference_mode(False):  # they are written in and outside inference mode
            self._both = self._shape.split(buffer)

    def _content(self, kind: int) -> torch.Tensor:
        """K (0) or V (1), ``[1, Hkv, n, D]``."""
        replaced = self._replaced[kind]
        return self._both[kind].narrow(2, 0, self.length) if replaced is None else replaced

    def _replace(self, kind: int, content: torch.Tensor | None) -> None:
        """transformers repeats, reorders, crops and drops what a layer holds."""
        self._replaced[kind] = content
        if content is None:
            self.length = 0

    keys = property(lambda self: self._content(0), lambda self, keys: self._replace(0, keys))
    values = property(lambda self: self._content(1), lambda self, values: self._replace(1, values))

    def get_seq_length(self) -> int:
        replaced = self._replaced[0]
        return self.length if replaced is None else replaced.shape[-2]

    def show(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the first ``length`` tokens the cache's content; returns K and V ``[1, Hkv, n, D]``."""
        self.length, self._replaced = length, [None, None]
        keys, values = self._both
        return keys.narrow(2, 0, length), values.narrow(2, 0, length)

    def scatter(
        self, at: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor, length: int
    ) -> None:
        """Write K and V ``[Hkv, S, D]`` at tokens ``at`` (``None``: all of ``length``), then :meth:`show`."""
        for buffer, fresh in zip(self._both, (keys, values), strict=True):
            if at is None:
                buffer[0, :, :length].copy_(fresh)
            else:
                buffer[0, :, :length].index_copy_(1, at, fresh)
        self.show(length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append in place; concatenates once beams have replaced the content."""
        if not self.is_view or key_states.shape[0] != 1:
            return super().update(key_states, value_states)
        start, count = self.length, key_states.shape[-2]
        end = start + count
        if end > self.buffer.shape[-2]:
            self.reserve(end + max(64, end // 8))
        keys, values = self._both
        keys.narrow(2, start, count).copy_(key_states)
        values.narrow(2, start, count).copy_(value_states)
        self.length = end
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def release(self) -> None:
        """Drop all KV."""
        self._keep_in(self.buffer.new_empty((*self.buffer.shape[:3], 0, self.buffer.shape[4])))
        self.show(0)

    @property
    def is_view(self) -> bool:
        """Whether its content is the beginning of :attr:`buffer`."""
        keys = self._replaced[0]
        if keys is None:
            return True
        # cropped; an empty view has no address
        same = not keys.numel() or keys.data_ptr() == self.buffer.data_ptr()
        if keys.shape[0] == 1 and same:
            self.show(keys.shape[-2])
        return self._replaced[0] is None

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens``, in a buffer of its own."""
        *dims, _, width = self.buffer.shape
        wider = self.buffer.new_empty((*dims, tokens, width))
        wider[..., : self.length, :] = self.buffer[..., : self.length, :]
        self._keep_in(wider)


class BlendCache(DynamicCache):
    """KV of one sequence of up to ``capacity`` tokens without reallocation."""

    layers: list[BlendLayer]
    start = 0
    """Where its tokens begin in buffers that it shares."""
    is_part = False
    """Whether it shares its buffers."""

    def __init__(self, layout: KVLayout, capacity: int, device: torch.device) -> None:
        group_bytes = GROUP_BYTES.get(device.type, GROUP_BYTES["cpu"])
        groups = []
        with torch.inference_mode(False):  # the loader's thread writes them outside inference mode
            for shape, same in groupby(layout.layers):
                layers = len(list(same))
                kinds, *rest = shape.tensor_shape(capacity)
                kv_shape = (kinds, 1, *rest)
                layer_bytes = math.prod(kv_shape) * layout.torch_dtype.itemsize
                most = max(1, group_bytes // max(layer_bytes, 1))
                for first in range(0, layers, most):
                    shapes = (min(most, layers - first), *kv_shape)
                    groups.append(torch.empty(shapes, dtype=layout.torch_dtype, device=device))
        self.shapes = layout.layers
        self._keep_in(groups)

    def _keep_in(self, groups: Sequence[torch.Tensor]) -> None:
        self._groups = groups
        """Buffers of consecutive layers, ``[layers, 2, 1, Hkv, capacity, D]`` each."""
        buffers = [buffer for each in groups for buffer in each]
        made = [BlendLayer(*each) for each in zip(buffers, self.shapes, strict=True)]
        Cache.__init__(self, layers=made)
        self.merge: Merge | None = None
        """Takes new K/V during the blended forward."""

    def part(self, start: int, capacity: int) -> BlendCache:
        """A cache over a stretch of this one's buffers; if it grows, it gets its own buffers."""
        made = BlendCache.__new__(BlendCache)
        made.start, made.shapes, made.is_part = start, self.shapes, True
        with torch.inference_mode(False):
            made._keep_in([group[..., start : start + capacity, :] for group in self._groups])
        return made

    def __bool__(self) -> bool:
        """Whether it holds anything.

        Phi3's and Phimoe's ``prepare_inputs_for_generation`` (transformers 5.23) drop a cache of fewer tokens
        than the original length before a longer prompt; the stock one has no layers yet and is left alone.
        """
        return self.get_seq_length() > 0

    @property
    def is_one_sequence(self) -> bool:
        """Whether it is an ordinary cache of one sequence, in its buffers."""
        return self.merge is None and all(layer.is_view for layer in self.layers)

    @property
    def positions(self) -> Sequence[int]:
        return range(self.get_seq_length())

    @property
    def next_position(self) -> int:
        """The position of the token after its newest one."""
        return self.get_seq_length()

    def visible(self, window: Window) -> slice | torch.Tensor:
        """Its tokens that the newest one sees: a slice, or their indices."""
        return slice(max(0, window.first_seen(self.next_position - 1)), None)

    @property
    def room(self) -> int:
        """Tokens that can still be appended in place."""
        layer = self.layers[0]
        return layer.buffer.shape[-2] - layer.length

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` in buffers of its own, layer by layer."""
        self._groups, self.is_part = (), False  # else they would be held
        for layer in self.layers:
            layer.reserve(tokens)

    def release(self) -> None:
        """Drop all KV; it is kept elsewhere from now on."""
        self._groups = ()
        for layer in self.layers:
            layer.release()

    def show(self, length: int) -> None:
        """Make the first ``length`` tokens of every layer the cache's content."""
        for layer in self.layers:
            layer.show(length)

    def groups(self, tokens: int) -> list[torch.Tensor]:
        """Views ``[layers, 2, Hkv, tokens, D]`` of consecutive layers; none after the blended forward."""
        return [group[:, :, 0, :, :tokens] for group in self._groups]

    def buffers(self, tokens: int) -> list[torch.Tensor]:
        """Views ``[2, Hkv, tokens, D]``, one per layer."""
        return [layer.buffer[:, 0, :, :tokens] for layer in self.layers]

    def end_fusion(self) -> None:
        """Become an ordinary cache. Buffers that grow are no longer held by their group. Idempotent."""
        self.merge, self._groups = None, ()

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.merge is not None:
            return self.merge(key_states, value_states, layer_idx)
        return self.layers[layer_idx].update(key_states, value_states)
