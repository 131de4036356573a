"""One forward that decodes a token for each of the running requests, or of a single one.

The model sees a batch of one-token sequences, each at its own position, without padding. Keys and values go
to each request's own cache or overlay. A row attends to its cache, or to its overlay and the chunks that it
shares (:mod:`blendrag.serving.chunk_pool`). Requests of hybrid models have running states, too
(:mod:`blendrag.serving.hybrid_rows`).
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from blendrag.fusor.attention import NotServedError, attend_token, implementation, require_plain
from blendrag.fusor.cache import BlendCache, BlendLayer
from blendrag.fusor.pack import output_like
from blendrag.model import measurements
from blendrag.model.adapter import ModelAdapter
from blendrag.model.compat import register_attention
from blendrag.model.decode_weights import DecodeWeights
from blendrag.model.kv_compare import LOGIT_TOLERANCE, difference_of
from blendrag.model.windows import Window, window_of
from blendrag.serving.chunk_pool import ChunkPool, LoadedPrompt, RequestKV
from blendrag.serving.hybrid_rows import (
    AttentionCall,
    HybridKV,
    HybridPool,
    HybridRows,
    is_one_sequence,
)
from blendrag.serving.kv_pool import KVPool
from blendrag.store.kv import dtype_name

log = logging.getLogger(__name__)

NAME = "blendrag_decode"
#: Tokens of the prompts over which joint steps of a hybrid model are measured, and how many steps.
MEASURED_PROMPTS, MEASURED_STEPS = (7, 12), 2
#: Counts up when something else is measured, so that earlier results are not used.
STEPS_VERSION = 1
#: Arguments of a forward that joint steps provide themselves, or that do not matter for one token.
_PROVIDED = frozenset(
    ("input_ids", "past_key_values", "position_ids", "cache_position", "attention_mask", "use_cache",
     "return_dict", "logits_to_keep")
)  # fmt: skip


@dataclass(frozen=True)
class DecodeStep:
    """A forward of one request that decodes a token."""

    forward: Callable[..., Any]
    """The model's."""
    ids: torch.Tensor
    """``[1, 1]``"""
    kv: RequestKV | HybridKV
    weights: DecodeWeights | None = None
    """What the request decodes with; ``None``: the model's own weights."""

    @property
    def decode(self) -> Callable[..., Any]:
        """``forward`` with these weights."""
        if self.weights is None:
            return self.forward
        return partial(self.weights.decode, self.forward)


def can_join(adapter: ModelAdapter, given: Mapping[str, Any]) -> bool:
    """Whether a forward with these arguments decodes one token, and nothing more is asked of it."""
    ids, cache = given.get("input_ids"), given.get("past_key_values")
    if not isinstance(ids, torch.Tensor) or ids.shape != (1, 1):
        return False
    if adapter.composition is None:
        joins = isinstance(cache, BlendCache) and cache.is_one_sequence
    else:
        joins = is_one_sequence(cache)
    if not joins:
        return False
    more = (given[name] for name in given.keys() - _PROVIDED)
    if any(value is not None and value is not False for value in more):
        return False
    # All rows of a forward use one rotary table. At the limit itself, transformers (5.23) keeps a dynamic
    # table that a longer sequence left.
    limit = adapter.blend_limit_tokens
    return limit is None or kv_of(adapter, cache).next_position < limit - 1


def kv_of(
    adapter: ModelAdapter, cache: Any, loaded: LoadedPrompt | None = None
) -> RequestKV | HybridKV:
    """The KV of a request whose forwards :func:`can_join`."""
    return RequestKV(cache, loaded) if adapter.composition is None else HybridKV(cache)


def decoded_together(steps: Sequence[DecodeStep], pool: KVPool[Any]) -> list[Any]:
    """What the forward of each step would return: logits ``[1, 1, V]`` and its cache.

    All steps have the same weights. After an error all KV is as before.
    """
    requests: list[Any] = [step.kv for step in steps]
    forward = steps[0].decode

    def prepare() -> _Rows | HybridRows:
        if isinstance(pool, ChunkPool):
            return _Rows(requests, pool)
        return HybridRows(requests, pool.adapter)

    rows = pool.prepared(requests, prepare)
    rows.advance()
    try:
        with torch.inference_mode(), _attending(pool.adapter, rows):
            output = forward(
                input_ids=torch.cat([step.ids for step in steps]),  # [R, 1]
                position_ids=rows.ends[1:, None],  # [R, 1]
                past_key_values=rows,
                use_cache=True,
                return_dict=True,
            )
    except BaseException:
        rows.retract()
        raise
    finally:
        rows.written.clear()  # views of buffers that may be replaced before the next token
    return [
        output_like(output, one.cache, logits=logits)
        for logits, one in zip(output.logits.split(1), requests, strict=True)
    ]


def may_decode_together(pool: KVPool[Any], requests: int) -> bool:
    """Whether so many requests may decode in one forward. For a hybrid model this is measured and remembered;
    a single request then uses its own forward."""
    if not isinstance(pool, HybridPool):
        return True
    if pool.serves is None and requests > 1:
        pool.serves = _serves(pool.adapter)
    return requests > 1 and bool(pool.serves)


def _serves(adapter: ModelAdapter) -> bool:
    """Whether joint steps serve a hybrid model, whose layers may raise anything there."""
    try:
        what = f"joint steps {STEPS_VERSION}"
        key = measurements.key_of(what, adapter.identity.namespace, adapter.device)
        serves = measurements.recall(key, bool)
        if serves is None:
            serves = steps_agree(adapter)
            measurements.remember(key, serves)
    except Exception as exc:
        log.info("%s decodes its requests in turns: %s", adapter.model_id, exc)
        return False
    return serves


@torch.inference_mode()
def steps_agree(adapter: ModelAdapter) -> bool:
    """Whether joint steps of a hybrid model give what each request gets alone. Raises what its layers do."""
    composition, vocab = adapter.composition, adapter.model.get_input_embeddings().num_embeddings
    assert composition is not None
    ids = torch.tensor([[(19 + 43 * i + i * i) % vocab for i in range(sum(MEASURED_PROMPTS))]])
    prompts = ids.to(adapter.device).split(MEASURED_PROMPTS, 1)
    alone = [composition.new_cache() for _ in prompts]
    for prompt, cache in zip(prompts, alone, strict=True):
        composition.forward(prompt, cache, 0)
    together = [HybridKV(copy.deepcopy(cache)) for cache in alone]
    pool = HybridPool(adapter)
    for at in range(MEASURED_STEPS):
        steps = [
            DecodeStep(adapter.model.forward, prompt[:, at : at + 1], kv)
            for prompt, kv in zip(prompts, together, strict=True)
        ]
        for made, step, cache in zip(decoded_together(steps, pool), steps, alone, strict=True):
            position = int(cache.get_seq_length())
            own = composition.forward(step.ids, cache, position)[-1].float()  # [V]
            allowed = LOGIT_TOLERANCE[dtype_name(adapter.precision)] * float(own.abs().max())
            if not difference_of(made.logits[0, -1], own) <= allowed:
                return False
    return True


class _RowsLayer(DynamicLayer):
    """One layer of the KV of several requests."""

    def __init__(self, rows: _Rows, index: int, is_latent: bool) -> None:
        """``is_latent``: what it holds is expanded to K and V before it is attended to."""
        super().__init__()
        self._rows = weakref.proxy(rows)  # a cycle would keep KV until garbage is collected
        self._index = index
        self._layers: list[BlendLayer] = [cache.layers[index] for cache in rows.caches]
        self.is_latent = is_latent

    def get_seq_length(self) -> int:
        """As if the sequences were padded to one length."""
        length: int = self._rows.length
        return length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows ``[R, Hkv, 1, D]`` to caches; :func:`attend` appends to overlays. Returns them or, in
        latent layers, all that the rows hold, one after another: ``[1, Hkv, ΣN, D]``."""
        rows = self._rows.alone
        if len(rows) == len(key_states):
            fresh = [*zip(key_states.split(1), value_states.split(1), strict=True)]
        else:
            fresh = [(key_states[row, None], value_states[row, None]) for row in rows]
        held = [layer.update(*each) for layer, each in zip(self._layers, fresh, strict=True)]
        keys, values = key_states, value_states
        if self.is_latent:
            keys, values = held[0]
            if len(held) > 1:
                keys, values = (torch.cat(each, 2) for each in zip(*held, strict=True))
        self._rows.written[self._index] = _Written(keys, values, held)
        return keys, values


class _Rows(Cache):
    """The KV of several requests, one a row: prepared once, for all tokens until one joins or leaves.

    For every new token :meth:`advance`, then a forward.
    """

    layers: list[_RowsLayer]

    def __init__(self, requests: Sequence[RequestKV], pool: ChunkPool) -> None:
        adapter = pool.adapter
        self._requests = requests
        self._device = adapter.device
        self.alone = [row for row, one in enumerate(requests) if one.running is None]
        """Rows with a cache of their own."""
        self.shared = pool.attention(requests)
        self.sharing: slice | torch.Tensor = slice(None)
        """Rows that ``shared`` attends."""
        if self.alone and self.shared is not None:
            sharing = [row for row, one in enumerate(requests) if one.running is not None]
            self.sharing = torch.tensor(sharing, device=self._device)
        self.caches = [requests[row].cache for row in self.alone]
        self.written: dict[int, _Written] = {}
        """By layer, in a forward."""
        self._parts: dict[nn.Module, _AttentionPart] = {}
        super().__init__(
            layers=[
                _RowsLayer(self, i, kind == "latent")
                for i, kind in enumerate(adapter.repositioner.kinds)
            ]
        )

    def advance(self) -> None:
        """Make place for the next token of each request."""
        self._lengths = [cache.get_seq_length() for cache in self.caches]
        positions = [one.next_position for one in self._requests]
        self.length = max(positions)
        self.ends = torch.tensor([self.length, *positions], device=self._device)
        """The position of the longest row, and that of each: ``[1 + R]``."""
        if self.shared is not None:
            self.shared.advance()

    def retract(self) -> None:
        """Undo :meth:`advance` after a forward that failed."""
        if self.shared is not None:
            self.shared.retract()
        for cache, length in zip(self.caches, self._lengths, strict=True):
            cache.show(length)

    def part(self, call: AttentionCall) -> _AttentionPart:
        """What the module of the ``call`` attends to, found for its first token.

        Raises :class:`NotServedError`.
        """
        module, part = call.module, self._parts.get(call.module)
        if part is None:
            layer = self._layer_of(module, call.key)
            is_latent = self.layers[layer].is_latent
            if not (is_latent or self.written[layer].holds(call.key, call.value)):
                raise NotServedError(
                    "the layer changes what its cache holds before it attends to it"
                )
            rescales = getattr(module, "attn_temperature_tuning", False) and not module.use_rope
            window = window_of(module, call.sliding_window)
            part = self._parts[module] = _AttentionPart(layer, window, bool(rescales))
        return part

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Each row over the KV of its request → ``[R, 1, H, D]``. Raises :class:`NotServedError`."""
        layer, window, rescales = self.part(call)
        query = self.rescaled(call.module, call.query) if rescales else call.query
        key, value = call.key, call.value
        scaling = query.shape[3] ** -0.5 if call.scaling is None else call.scaling
        held = self.written[layer].held
        if self.layers[layer].is_latent:  # expanded by now
            lengths = [latents.shape[2] for latents, _ in held]
            held = [*zip(key.split(lengths, 2), value.split(lengths, 2), strict=True)]
        outs = []
        for row, cache, (keys, values) in zip(self.alone, self.caches, held, strict=True):
            if window is not None:
                seen = cache.visible(window)
                keys, values = keys[:, :, seen], values[:, :, seen]
            outs.append(attend_token(query[row, None], keys, values, scaling))
        if self.shared is None:
            return outs[0] if len(outs) == 1 else torch.cat(outs)
        mine = self.sharing
        qkv = query[mine, :, 0], key[mine, :, 0], value[mine, :, 0]
        shared = self.shared.attend(layer, *qkv, scaling, window)[:, None]
        if not outs:
            return shared
        out = query.new_empty((len(query), 1, *shared.shape[2:]))
        out[mine] = shared
        out[self.alone] = torch.cat(outs)
        return out

    def rescaled(self, module: nn.Module, query: torch.Tensor) -> torch.Tensor:
        """``query`` ``[R, H, 1, D]``, which Llama 4 scaled by the position of the longest row in some layers,
        scaled by each row's own."""
        steps = ((self.ends + 1.0) / module.floor_scale).floor()  # type: ignore[operator]
        longest, *own = torch.log1p(steps).mul(module.attn_scale).add(1.0)  # type: ignore[arg-type]
        scales = torch.stack(own) / longest
        return (query * scales[:, None, None, None]).to(query.dtype)

    def _layer_of(self, module: nn.Module, keys: torch.Tensor) -> int:
        """Whose KV it was given: its own layer's, or that of an earlier layer (Gemma 3n and 4)."""
        index: int = module.layer_idx  # type: ignore[assignment]
        if index in self.written:
            return index
        for index, written in self.written.items():
            if written.keys is keys:
                return index
        raise NotServedError("the layer does not attend to what its cache holds")


class _Written(NamedTuple):
    """K and V of one layer in a forward."""

    keys: torch.Tensor
    values: torch.Tensor
    """Those of the newest tokens, as :meth:`_RowsLayer.update` returned them."""
    held: list[tuple[torch.Tensor, torch.Tensor]]
    """All ``[1, Hkv, N, D]`` of each row with a cache of its own."""

    def holds(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether these are the newest ones, in any dtype. DiffLlama attends to other values."""
        pairs = (keys, self.keys), (values, self.values)
        return all(a is b or (a.shape == b.shape and a.to(b.dtype).equal(b)) for a, b in pairs)


class _AttentionPart(NamedTuple):
    """What one attention module attends to."""

    layer: int
    window: Window | None
    rescales: bool
    """Whether its queries are scaled by their position."""


_rows: ContextVar[_Rows | HybridRows | None] = ContextVar("blendrag_decode_rows", default=None)


@contextmanager
def _attending(adapter: ModelAdapter, rows: _Rows | HybridRows) -> Iterator[None]:
    register_attention(NAME, attend)
    token = _rows.set(rows)
    try:
        with implementation(adapter.stack, NAME):
            yield
    finally:
        _rows.reset(token)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` ``[R, H, 1, D]``, each row over the KV of its request → ``[R, 1, H, D]``."""
    rows = _rows.get()
    if rows is None or attention_mask is not None:
        raise NotServedError("the layer does not attend to what its cache holds")
    require_plain(kwargs)
    return rows.attend(AttentionCall(module, query, key, value, scaling, sliding_window)), None
