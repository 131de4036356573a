"""KV and running states of several requests of a hybrid model, for one forward that decodes a token of each.

Every request keeps the cache that its prefill left. Attention layers append a row's K and V to that of its
request, and each row attends to that. The running states ``[1, …]`` of the requests become rows of one tensor
``[R, …]``, which the model reads and writes as for any batch; the caches hold views of their rows. No row is
padded.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache

from blendrag.fusor.attention import NotServedError, attend_token
from blendrag.fusor.composer import windows_of
from blendrag.model.adapter import ModelAdapter
from blendrag.serving.kv_pool import KVPool
from blendrag.serving.set_aside import SetAside

#: Where transformers' layers keep running states (5.23): dicts of tensors, by number.
STATES = ("recurrent_states", "conv_states")


@dataclass(eq=False)
class HybridKV:
    """What one running request holds, in the cache that its prefill left."""

    cache: DynamicCache
    is_part = False
    running = None
    """Shares no chunks."""
    _aside: tuple[SetAside, list[torch.Size]] | None = None
    """What of it was moved away, and the shapes; then the cache holds nothing."""

    @property
    def next_position(self) -> int:
        """The position of the token that is decoded next."""
        return int(self.cache.get_seq_length())

    def put_aside(self) -> None:
        """Move all to where it takes no memory of other requests."""
        tensors = [held[name] for held, name in self._places()]
        self._aside = SetAside(tensors), [tensor.shape for tensor in tensors]
        for (held, name), tensor in zip(self._places(), tensors, strict=True):
            held[name] = tensor.new_empty(0)

    def take_back(self) -> None:
        """Undo :meth:`put_aside`."""
        assert self._aside is not None
        aside, shapes = self._aside
        places = list(self._places())
        tensors = [held[name].new_empty(s) for (held, name), s in zip(places, shapes, strict=True)]
        aside.restore(tensors)
        for (held, name), tensor in zip(places, tensors, strict=True):
            held[name] = tensor
        self._aside = None

    def leave_rows(self) -> None:
        """Copy what is a view of the rows of several requests."""
        for layer in self.cache.layers:
            for states, number in _states(layer):
                states[number] = states[number].clone()

    def _places(self) -> Iterator[tuple[dict[Any, torch.Tensor], Any]]:
        """Where its tensors are: first the K and V of all layers."""
        for layer in self.cache.layers:
            if _has_kv(layer):
                yield from ((vars(layer), name) for name in ("keys", "values"))
        for layer in self.cache.layers:
            yield from _states(layer)


def is_one_sequence(cache: Any) -> bool:
    """Whether it is an ordinary cache of transformers with one sequence."""
    if type(cache) is not DynamicCache or cache.offloading:
        return False
    keys = (layer.keys for layer in cache.layers if _has_kv(layer))
    states = (held[number] for layer in cache.layers for held, number in _states(layer))
    return all(tensor.shape[0] == 1 for tensors in (keys, states) for tensor in tensors)


def _has_kv(layer: Any) -> bool:
    return isinstance(getattr(layer, "keys", None), torch.Tensor)


def _states(layer: Any) -> Iterator[tuple[dict[int, torch.Tensor], int]]:
    """Where the running states of a cache's ``layer`` are."""
    for name in STATES:
        held = getattr(layer, name, {})
        yield from ((held, number) for number, state in held.items() if state is not None)


class AttentionCall(NamedTuple):
    """What a layer gives to its attention function for a token of each row."""

    module: nn.Module
    query: torch.Tensor
    """``[R, H, 1, D]``"""
    key: torch.Tensor
    value: torch.Tensor
    """``[R, Hkv, 1, D]`` both."""
    scaling: float | None
    sliding_window: int | None


class HybridRows(Cache):
    """The caches of several requests, one a row: prepared once, for all tokens until one joins or leaves.

    For every new token :meth:`advance`, then a forward.
    """

    def __init__(self, requests: Sequence[HybridKV], adapter: ModelAdapter) -> None:
        self._requests, self._device = requests, adapter.device
        self._windows = windows_of(adapter)
        self._caches = [one.cache for one in requests]
        self.written: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """By layer, in a forward: K and V ``[1, Hkv, N, D]`` of each row."""
        layers = [*zip(*(cache.layers for cache in self._caches), strict=True)]
        super().__init__(layers=[self._joined(*each) for each in enumerate(layers)])
        self._saved = [state.clone() for state in self._all_states()]
        self._lengths: list[_KVBefore] = []

    def _joined(self, index: int, layers: Sequence[Any]) -> Any:
        """One layer for these ``layers`` of the requests, whose running states become views of its."""
        made = copy.copy(layers[0])
        for name in STATES:
            held = [getattr(layer, name, {}) for layer in layers]
            joined = {
                i: None if state is None else torch.cat([states[i] for states in held])
                for i, state in held[0].items()
            }
            if joined:
                setattr(made, name, joined)
        if _has_kv(made):
            rows = weakref.proxy(self)  # a cycle would keep KV until garbage is collected
            made.keys = made.values = None
            made.update = partial(_append, rows, index, layers)
            made.get_seq_length = lambda *_: rows.length
        self._share(made, layers)
        return made

    def _share(self, joined: Any, layers: Sequence[Any]) -> None:
        """Make the states of ``layers`` views of those of the ``joined`` layer."""
        for name in STATES:
            for number, states in getattr(joined, name, {}).items():
                for row, layer in enumerate(layers):
                    if states is not None:
                        getattr(layer, name)[number] = states[row : row + 1]

    def _all_states(self) -> Iterator[torch.Tensor]:
        return (held[number] for layer in self.layers for held, number in _states(layer))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As if the sequences were padded to one length."""
        return self.length

    def advance(self) -> None:
        """Keep what the next forward may change."""
        positions = [one.next_position for one in self._requests]
        self.length = max(positions)
        self.ends = torch.tensor([self.length, *positions], device=self._device)
        """The position of the longest row, and that of each: ``[1 + R]``."""
        self._lengths = [
            _KVBefore.of(layer)
            for cache in self._caches
            for layer in cache.layers
            if _has_kv(layer)
        ]
        for saved, state in zip(self._saved, self._all_states(), strict=True):
            saved.copy_(state)

    def retract(self) -> None:
        """Undo a forward that failed."""
        for held in self._lengths:
            held.restore()
        for saved, state in zip(self._saved, self._all_states(), strict=True):
            state.copy_(saved)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Each row over the KV of its request → ``[R, 1, H, D]``. Raises :class:`NotServedError`."""
        index: int = call.module.layer_idx  # type: ignore[assignment]
        if index not in self.written:
            raise NotServedError("the layer does not attend to what its cache holds")
        window, outs = self._windows[index], []
        for row, (keys, values) in enumerate(self.written[index]):
            if window is not None:
                first = max(0, window.first_seen(keys.shape[2] - 1))
                keys, values = keys[:, :, first:], values[:, :, first:]
            outs.append(attend_token(call.query[row, None], keys, values, call.scaling))
        return torch.cat(outs)


class _KVBefore(NamedTuple):
    """The KV of a layer of a request before a forward."""

    layer: Any
    tokens: int
    window: dict[str, Any]
    """All of a layer that drops what is behind its window."""

    @classmethod
    def of(cls, layer: Any) -> _KVBefore:
        window = {**vars(layer)} if getattr(layer, "is_sliding", False) else {}
        return cls(layer, layer.keys.shape[2], window)

    def restore(self) -> None:
        layer = self.layer
        vars(layer).update(self.window)
        layer.keys, layer.values = (
            layer.keys[:, :, : self.tokens],
            layer.values[:, :, : self.tokens],
        )


def _append(
    rows: Any,
    index: int,
    layers: Sequence[Any],
    keys: torch.Tensor,
    values: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append K and V ``[R, Hkv, 1, D]`` to what the ``layers`` of the requests hold. ``rows``: theirs."""
    fresh = zip(layers, keys.split(1), values.split(1), strict=True)
    rows.written[index] = [layer.update(k, v) for layer, k, v in fresh]
    return keys, values


class HybridPool(KVPool[HybridKV]):
    """The running requests of one hybrid model."""

    def __init__(self, adapter: ModelAdapter) -> None:
        super().__init__(adapter)
        self.serves: bool | None = None
        """Whether a joint step gives what each request gets alone; ``None``: not measured yet."""

    def share(self, requests: Sequence[HybridKV]) -> None:
        """They have nothing to share: a running state is each request's own."""

    def reserve(self, request: HybridKV, room: int) -> None:
        """Its cache grows by itself."""

    def put_aside(self, request: HybridKV) -> None:
        self.leave(request)
        request.put_aside()

    def take_back(self, request: HybridKV, room: int) -> None:
        request.take_back()

    def leave(self, request: HybridKV) -> None:
        # a single one that is left decodes by itself, and should not hold the memory of all
        if self._prepared is not None and request in self._prepared[0]:
            others = [one for one in self._prepared[0] if one is not request]
            self._prepared = None
            if len(others) == 1:
                others[0].leave_rows()
