"""Chunks of hybrid models, which have linear layers among those of attention, are composed at any place.

The record of a chunk has its K and V for layers of attention, and for linear ones what the chunk does to the
running state (:mod:`blendrag.model.linear_layers`). A prompt is composed in order: what is not stored is
computed by the model behind what is there, a chunk's keys are moved and appended, and its record is applied
to the running states. No token of a chunk is computed. The result is a cache that ``generate`` goes on from.

As with KV this is exact as far as the chunk's tokens enter each layer as they did when it was encoded.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionAndFullAttentionLayer

from blendrag.errors import InvalidInputError, UnsupportedModelError
from blendrag.model import linear_layers, single_steps
from blendrag.model.continuation import Continuation, KVSource
from blendrag.model.growing_layers import grow_in_place
from blendrag.model.linear_layers import KnownLinear, LayerRecord, LinearLayer, Map, MixerRun
from blendrag.model.positions import PROBE_OFFSETS, LayersKV, Repositioner, classify
from blendrag.model.structure import DecoderStack, hybrid_stack
from blendrag.store.kv import ChunkKV, KVLayout, LayerShape, dtype_name
from blendrag.store.tensor_bytes import DTYPES

#: Counts up when records mean something else, so that earlier ones are not used.
RECORD_VERSION = 1
#: Tokens by which layers are measured, in three forwards.
MEASURED_TOKENS = (11, 13, 2)
PROBE_TOKENS = 8
#: Counts up when something else is measured, so that earlier results are not used.
CHECKS_VERSION = 1
#: Kinds of linear layers, for people.
NAMES = {Map.DECAY: "decay", Map.ROWS: "matrix", Map.COLUMNS: "matrix"}


@dataclass(frozen=True)
class ComposedLayer:
    """One layer of the layout: K and V, or the running states, of a layer of the cache."""

    index: int
    shape: LayerShape
    linear: LinearLayer | None = None
    attention: int = -1
    """Which layer of attention it is, if it has K and V."""


@dataclass(frozen=True)
class CompositionChecks:
    """What a :class:`Composition` has measured of a model's layers. How keys move is probed each time, as in
    other models."""

    linear: tuple[KnownLinear, ...]


class Composition:
    """How one model's chunks are encoded and composed. Used in inference mode, under the model's lock."""

    def __init__(
        self,
        model: Any,
        going: Continuation,
        device: torch.device,
        reach: int,
        known: CompositionChecks | None = None,
    ) -> None:
        """``going``: how the model goes on from a cache. ``reach``: positions that keys can be moved over.
        ``known``: what was measured before.

        Raises :class:`UnsupportedModelError` if a layer's state or keys cannot be composed.
        """
        self._model, self._going, self._device = model, going, device
        self._vocab = model.get_input_embeddings().num_embeddings
        self._in_blocks: list[LinearLayer] = []
        """Layers that take tokens behind a state one by one."""
        self._empty, self.entries = self._measured(known)
        if going.in_steps:
            self._in_blocks = self._of_single_steps()
        self.stack: DecoderStack = hybrid_stack(
            model,
            [entry.index for entry in self.with_kv],
            {entry.linear.mixer for entry in self.entries if entry.linear is not None},
        )
        dtype = dtype_name(self._empty_kv_dtype or model.dtype)
        if dtype not in DTYPES:
            raise UnsupportedModelError(
                f"KV of dtype {dtype} is not one of {sorted(DTYPES)}; use mode full"
            )
        self.layout = KVLayout(tuple(entry.shape for entry in self.entries), dtype)
        self.repositioner = self._classified(reach)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each layer of the layout is, for people."""
        return tuple(
            self.repositioner.kinds[entry.attention]
            if entry.linear is None
            else "/".join(NAMES[state.map] for state in entry.linear.recurrent) or "convolution"
            for entry in self.entries
        )

    @property
    def checks(self) -> CompositionChecks:
        layers, linear = self._going.layers, (entry.linear for entry in self.entries)
        return CompositionChecks(
            tuple(KnownLinear.of(layer, layers) for layer in linear if layer is not None)
        )

    @property
    def with_kv(self) -> list[ComposedLayer]:
        return [entry for entry in self.entries if entry.linear is None]

    @property
    def state_bytes(self) -> int:
        """Bytes of the running states of one sequence."""
        linear = [entry.linear for entry in self.entries if entry.linear is not None]
        held = [tensor for layer in linear for part in layer.held(self._empty) for tensor in part]
        return sum(tensor.nbytes for tensor in held)

    def new_cache(self) -> Cache:
        """One that holds no token; its running states are 0."""
        return copy.deepcopy(self._empty)

    def forward(
        self, ids: torch.Tensor, cache: Cache, position: int, rows: int = 1
    ) -> torch.Tensor:
        """Compute ``ids`` ``[1, n]`` behind what ``cache`` holds, the first one at ``position``. Returns the
        logits of the last ``rows`` ``[rows, V]``."""
        with self.going_on():
            return self._going.forward(ids, cache, position, rows, at_once=bool(self._in_blocks))

    def going_on(self) -> AbstractContextManager[None]:
        """Within this context every forward of the model goes on from the states that its cache holds."""
        return single_steps.going_on(self._in_blocks)

    # -- encode ---------------------------------------------------------------------------------------

    def encode(
        self, before: Sequence[int], ids: Sequence[int], position: int, moved: int = 0
    ) -> ChunkKV:
        """The record of ``ids`` computed behind ``before``, whose first token is at ``position``, on the
        model's device. Keys are then moved by ``moved``.

        Raises :class:`InvalidInputError` for NaN and infinity in a running state.
        """
        cache, skip = self.new_cache(), len(before)
        first = before[:1] if position else ()
        if first:  # at position 0, where RecurrentGemma starts its states
            self.forward(self._batch(first), cache, 0)
            self._move_held(cache, position)
        if before[len(first) :]:
            self.forward(self._batch(before[len(first) :]), cache, position + len(first))
        records: dict[LinearLayer, LayerRecord] = {}
        linear = {e.linear.mixer: e.linear for e in self.entries if e.linear is not None}

        def note(call: MixerRun) -> None:
            layer = linear[call.mixer]
            records[layer] = linear_layers.record_of(layer, call)

        mixers = [(layer.place, mixer) for mixer, layer in linear.items()]
        with linear_layers.calls(mixers, cache, note):
            self.forward(self._batch(ids), cache, position + skip)
        layers = []
        for entry in self.entries:
            if entry.linear is None:
                held = cache.layers[entry.index]
                layers.append(entry.shape.joined(held.keys[0, :, skip:], held.values[0, :, skip:]))
                continue
            record = records[entry.linear]
            if not all(bool(t.isfinite().all()) for part in record for t in part):
                raise InvalidInputError(
                    f"the running state of layer {entry.index} has NaN or infinity, expected finite numbers; "
                    "compute it in bfloat16 or float32, or leave this chunk out"
                )
            layers.append(entry.linear.packed(record))
        if moved:
            self._move_(layers, moved)
        return ChunkKV(self.layout, len(ids), layers)

    def is_alike(
        self, number: int, one: torch.Tensor, other: torch.Tensor, tolerance: float
    ) -> bool:
        """Whether two records of the running states of one layer of the layout are equal, up to ``tolerance``
        of the largest number of each of their tensors."""
        linear = self.entries[number].linear
        assert linear is not None
        pairs = zip(linear.unpacked(one), linear.unpacked(other), strict=True)
        return all(
            bool((a.float() - b.float()).abs().max() <= tolerance * a.float().abs().max())
            for some, others in pairs
            for a, b in zip(some, others, strict=True)
        )

    def disturbed(self, kv: ChunkKV, size: float) -> ChunkKV:
        """``kv`` with noise of ``size`` times the root mean square added to its part of running states."""
        layers, generator = [*kv.layers], torch.Generator().manual_seed(1)

        def disturb(tensor: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.device)
            return (tensor.float() + size * tensor.float().square().mean().sqrt() * noise).to(
                tensor
            )

        for number, entry in enumerate(self.entries):
            if entry.linear is not None:
                maps, added, tails = entry.linear.unpacked(layers[number])
                wrong = LayerRecord(maps, tuple(map(disturb, added)), tuple(map(disturb, tails)))
                layers[number] = entry.linear.packed(wrong)
        return replace(kv, layers=layers)

    def _batch(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], device=self._device)

    def _move_held(self, cache: Cache, offset: int) -> None:
        """Move the keys that ``cache`` holds by ``offset`` positions in place."""
        held = [cache.layers[entry.index] for entry in self.with_kv]
        self._rotate_([(layer.keys, layer.values) for layer in held], offset)

    def _move_(self, layers: Sequence[torch.Tensor], offset: int) -> None:
        """Move the keys of ``layers``, as in the layout, by ``offset`` positions in place."""
        pairs = zip(self.entries, layers, strict=True)
        self._rotate_([e.shape.split(kv) for e, kv in pairs if e.linear is None], offset)

    def _rotate_(self, kv: Sequence[tuple[torch.Tensor, torch.Tensor]], offset: int) -> None:
        """Rotate what turns of K and V ``[…, Hkv, T, D]`` of each layer of attention."""
        if not kv or not offset:
            return
        tokens, moves = kv[0][0].shape[-2], self.repositioner
        tables = moves.tables(torch.full((tokens,), offset, device=self._device))
        for number, both in enumerate(kv):
            moves.rotate_(both[moves.part(number)], number, tables)

    # -- compose --------------------------------------------------------------------------------------

    def read(self, record: KVSource) -> list[torch.Tensor]:
        """The layers of a stored ``record``, on the CPU. Raises what reading raises."""
        layers = []
        for number, entry in enumerate(self.entries):
            dtype = self.layout.layer_dtype(number)
            layers.append(torch.empty(entry.shape.tensor_shape(record.tokens), dtype=dtype))
            record.read_layer(number, layers[-1])
        return layers

    def append(
        self, cache: Cache, record: Sequence[torch.Tensor], tokens: int, offset: int
    ) -> None:
        """Add a chunk of so many ``tokens`` behind what ``cache`` holds.

        ``record``: what was stored of it, which is overwritten. Its keys are moved by ``offset``.
        """
        layers = [layer.to(self._device) for layer in record]
        self._move_(layers, offset)
        for entry, layer in zip(self.entries, layers, strict=True):
            if entry.linear is None:
                held = cache.layers[entry.index]
                keys, values = entry.shape.split(layer)
                held.keys = torch.cat((held.keys, keys[None]), 2)  # [1, Hkv, N, D]
                held.values = torch.cat((held.values, values[None]), 2)
            else:
                linear, before = entry.linear, entry.linear.held(cache)
                linear.put(cache, linear.after(linear.unpacked(layer), before, tokens))

    # -- measured when the model is loaded ------------------------------------------------------------

    def _measured(self, known: CompositionChecks | None) -> tuple[Cache, tuple[ComposedLayer, ...]]:
        """An empty cache, and what its layers hold."""
        cache = _unwindowed(self._going.new_cache())
        total = sum(MEASURED_TOKENS)
        ids = torch.tensor([[(37 + 41 * i + i * i) % self._vocab for i in range(total)]])
        ids = ids.to(self._device)
        found = None
        if known is not None:
            self.forward(ids, cache, 0)
            found = linear_layers.recalled(known.linear, self._going.layers, cache)
        if found is None:
            cache = _unwindowed(self._going.new_cache())
            found = self._linear_layers(cache, ids)
        entries, attention = list[ComposedLayer](), 0
        self._empty_kv_dtype: torch.dtype | None = None
        for index, layer in enumerate(cache.layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor):
                if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[2] != total:
                    raise UnsupportedModelError(
                        f"layer {index} keeps keys {tuple(keys.shape)} and values {tuple(values.shape)} for "
                        f"{total} tokens; a chunk needs one of each per token and head; use mode full"
                    )
                if any(
                    isinstance(held, torch.Tensor) and held is not keys and held is not values
                    for held in vars(layer).values()
                ):
                    raise UnsupportedModelError(
                        f"layer {index} of {type(self._model).__name__} keeps more than K and V for each "
                        "token, so the KV of a chunk is not enough; use mode full"
                    )
                entries.append(ComposedLayer(index, LayerShape.of(keys, values), None, attention))
                self._empty_kv_dtype = keys.dtype
                attention += 1
                layer.keys, layer.values = keys[:, :, :0].clone(), values[:, :, :0].clone()
            for linear in (each for each in found if each.place.layer == index):
                entries.append(ComposedLayer(index, linear.shape, linear))
                held = linear.held(cache)
                for tensors in held:
                    for tensor in tensors:
                        tensor.zero_()
                linear.put(cache, held)
        return cache, tuple(entries)

    def _linear_layers(self, cache: Cache, ids: torch.Tensor) -> list[LinearLayer]:
        """What the layers with running states do, measured while ``ids`` ``[1, N]`` are computed."""
        first, second, third = ids.split(MEASURED_TOKENS, 1)
        self.forward(first, cache, 0)
        mixers = linear_layers.find_mixers(
            self._going.layers, cache, lambda: self.forward(second, cache, first.shape[1])
        )
        found: dict[nn.Module, LinearLayer] = {}
        tokens = 1 if self._going.in_steps else third.shape[1]

        def note(call: MixerRun) -> None:
            found[call.mixer] = linear_layers.measured(call, tokens)

        with linear_layers.calls(mixers, cache, note):
            self.forward(third, cache, sum(MEASURED_TOKENS[:2]))
        return [found[mixer] for _, mixer in mixers]

    def _of_single_steps(self) -> list[LinearLayer]:
        """The layers with running states, of a model that takes tokens behind them one by one."""
        layers = [entry.linear for entry in self.entries if entry.linear is not None]
        if any(state.map is not Map.DECAY for layer in layers for state in layer.recurrent):
            raise UnsupportedModelError(
                f"{type(self._model).__name__} takes tokens behind a state one by one, and what they do to "
                "it is no decay, so its chunks cannot be composed; use mode full"
            )
        return layers

    def _classified(self, reach: int) -> Repositioner:
        """How the keys of the layers of attention move."""
        if not self.with_kv:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} has no layer of attention, so nothing tells a chunk's place; "
                "use mode full"
            )

        def kv_at(offset: int, ids: Sequence[int]) -> LayersKV:
            cache = self.new_cache()
            # RecurrentGemma computes position 0 otherwise: it starts its states there
            self.forward(self._batch(ids), cache, 1 + offset)
            layers = [cache.layers[entry.index] for entry in self.with_kv]
            return [(layer.keys[0], layer.values[0]) for layer in layers]

        ids = [(17 + 31 * i) % self._vocab for i in range(PROBE_TOKENS)]
        others = kv_at(0, [(5 + 97 * i) % self._vocab for i in range(PROBE_TOKENS)])
        offsets = {max(1, min(delta, reach - PROBE_TOKENS - 1)) for delta in PROBE_OFFSETS}
        shifted = {delta: kv_at(delta, ids) for delta in offsets}
        types = [self.stack.layer_types[entry.index] for entry in self.with_kv]
        stack = replace(self.stack, layer_types=types)
        dtype = self.layout.torch_dtype
        return classify(kv_at(0, ids), shifted, others, None, stack, dtype)


def _unwindowed(cache: Cache) -> Cache:
    """``cache``, empty, with layers that keep all tokens: a window is a mask over them, and what is behind a
    chunk may see its first tokens."""
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "is_sliding", False):
            states = getattr(layer, "number_of_states", 0)
            cache.layers[index] = (
                LinearAttentionAndFullAttentionLayer(states) if states else DynamicLayer()
            )
    grow_in_place(cache)
    return cache
