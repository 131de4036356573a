"""Forwards of tokens at any positions, also of models that cannot be blended (Prompt Cache §3.3, §4.2).

Keys are not moved, so learned positions (GPT-2) and ALiBi (BLOOM, MPT) serve as well as rotary ones. A token
sees the keys at its own position and before it, whatever their order in the cache. transformers (5.23) needs
help in three places:

* gapped ``position_ids`` without a mask or a cache are read as packed sequences, so a mask is always given;
* BLOOM and MPT take no ``position_ids`` and count the keys in the cache, so their ALiBi tensor is replaced;
* sliding windows and chunked attention count keys, too, so their masks are made from positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache

from blendrag.errors import InvalidInputError, UnsupportedModelError
from blendrag.model import fingerprint
from blendrag.model.adapter import ModelAdapter
from blendrag.model.sharing import replaced
from blendrag.model.structure import (
    Decoder,
    check_placement,
    find_decoder,
    layout_of,
    unsupported_if_raising,
)
from blendrag.store.identity import ModelIdentity, digest_fields
from blendrag.store.kv import ChunkKV, KVLayout, dtype_name

#: Methods of decoders that build an ALiBi tensor from the number of keys, and their first arguments.
ALIBI_BUILDERS = ("build_alibi_tensor", "build_mpt_alibi_tensor")
PROBE_TOKENS = 4


@dataclass(frozen=True)
class PlacedIdentity(ModelIdentity):
    """Identity of a model's KV at positions of its own. Its namespace is not that of chunks."""

    @property
    def namespace(self) -> str:
        return digest_fields([b"placed", super().namespace.encode()])


class PlacedModel:
    """A causal LM whose tokens are placed. ``refusal`` says why it cannot be, :meth:`require` raises it.

    Caller holds :attr:`lock` for whatever computes.
    """

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self.model = adapter.model
        self.model_id = adapter.model_id
        self.lock = adapter.lock
        self.uncompiled = adapter.uncompiled
        self.refusal: str | None = None
        self._decoder: Decoder | None = None
        self._layout: KVLayout | None = None
        self._builder = ""
        """Name of the method that builds the ALiBi tensor; empty if the model takes position_ids."""
        try:
            with self.lock, unsupported_if_raising(type(self.model).__name__):
                self._probe()
        except UnsupportedModelError as refused:
            self.refusal = str(refused)

    def require(self) -> None:
        """Raise :class:`UnsupportedModelError` if tokens of this model cannot be placed."""
        if self.refusal is not None:
            raise UnsupportedModelError(f"{self.model_id}: {self.refusal}")

    @torch.inference_mode()
    def _probe(self) -> None:
        check_placement(self.model)
        fingerprint.loaded(self.model)  # raises for weights that have no fingerprint
        self._decoder = found = find_decoder(self.model)
        name = type(self.model).__name__
        if "position_ids" not in inspect.signature(found.base.forward).parameters:
            builders = [each for each in ALIBI_BUILDERS if hasattr(found.base, each)]
            if not builders:
                raise UnsupportedModelError(
                    f"{name} takes no position_ids, so modules of a schema cannot be placed; use mode full"
                )
            self._builder = builders[0]
        cache = self.prefill_at(range(PROBE_TOKENS), range(PROBE_TOKENS))
        self._layout = layout_of(cache, len(found.layers), PROBE_TOKENS, name)

    # -- what it is -----------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._adapter.device

    @property
    def decoder(self) -> Decoder:
        self.require()
        assert self._decoder is not None
        return self._decoder

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        return self.decoder.layers

    @property
    def layout(self) -> KVLayout:
        self.require()
        assert self._layout is not None
        return self._layout

    @property
    def precision(self) -> torch.dtype:
        """The dtype whose numerical noise the model has."""
        quantised = fingerprint.is_quantised(self.model)
        return torch.bfloat16 if quantised else self.layout.torch_dtype

    @property
    def limit(self) -> int:
        """Number of positions: the context window, or what the rotary table encodes alike."""
        return self._adapter.encoded_alike()

    @property
    def identity(self) -> PlacedIdentity:
        """Identity of what is loaded now. Waits for a request in progress."""
        with self.lock:
            self.require()
            if dtype_name(self.model.dtype) != self.layout.dtype:
                self._probe()
            return PlacedIdentity(**vars(self._adapter.identity_over(self.decoder, self.layout)))

    # -- encode ---------------------------------------------------------------------------------

    def encode(self, prefix_ids: Sequence[int], ids: Sequence[int]) -> ChunkKV:
        """KV of ``ids`` directly after ``prefix_ids``, on the CPU, without the prefix."""
        whole = [*prefix_ids, *ids]
        (kv,) = self.encode_at(whole, range(len(whole)), [(len(prefix_ids), len(whole))])
        return kv

    @torch.inference_mode()
    def encode_at(
        self, ids: Sequence[int], positions: Sequence[int], stretches: Sequence[tuple[int, int]]
    ) -> list[ChunkKV]:
        """KV of the ``stretches`` of ``ids`` at ascending ``positions``, prefilled together, on the CPU.

        Raises :class:`InvalidInputError` for positions that the model does not have.
        """
        if ids and not 0 <= positions[0] <= positions[-1] < self.limit:
            raise InvalidInputError(
                f"tokens at positions {positions[0]} to {positions[-1]}, but {self.model_id} has "
                f"{self.limit} positions; shorten the schema"
            )
        layout = self.layout
        layers = [
            shape.joined(layer.keys[0], layer.values[0]).to("cpu", layout.torch_dtype)
            for shape, layer in zip(
                layout.layers, self.prefill_at(ids, positions).layers, strict=True
            )
        ]
        return [
            ChunkKV(layout, end - start, [layer[:, :, start:end].contiguous() for layer in layers])
            for start, end in stretches
        ]

    def prefill_at(self, ids: Sequence[int], positions: Sequence[int]) -> DynamicCache:
        """KV of ``ids`` at ``positions``. The LM head is not run."""
        assert self._decoder is not None
        cache = DynamicCache()
        batch = torch.tensor([list(ids)], device=self.device)
        with self.uncompiled(), self.placed(cache, positions):
            self._decoder.base(input_ids=batch, past_key_values=cache, use_cache=True)
        return cache

    # -- place ----------------------------------------------------------------------------------

    @contextmanager
    def placed(self, cache: Cache, positions: Sequence[int]) -> Iterator[None]:
        """Within this context, forwards with ``cache`` place token number s at ``positions[s]``.

        Tokens after these continue from the largest position.
        """
        assert self._decoder is not None
        base = self._decoder.base
        at = torch.tensor(list(positions), device=self.device)
        following = int(at.max()) + 1 if len(at) else 0

        def place(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            carried: Any = kwargs.get("past_key_values")
            if carried is not cache:
                return None
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            before, tokens = int(carried.get_seq_length()), ids.shape[-1]
            keys = at[: before + tokens]
            if (more := before + tokens - len(at)) > 0:
                keys = torch.cat((at, torch.arange(following, following + more, device=at.device)))
            rows = keys[before:]
            given = {**kwargs, "attention_mask": self._masks(rows, keys)}
            if self._builder:
                _keys.set(keys)
            else:
                given["position_ids"] = rows[None]
            return args, given

        with ExitStack() as around:
            around.callback(base.register_forward_pre_hook(place, with_kwargs=True).remove)
            if self._builder:
                around.enter_context(_alibi_by_position(base, self._builder))
            yield

    def _masks(self, rows: torch.Tensor, keys: torch.Tensor) -> Any:
        """The decoder's mask for the cache's last tokens at ``rows`` ``[s]`` among all ``keys`` ``[k]``."""
        assert self._decoder is not None
        windows = self._decoder.windows
        has_runs = "chunked_attention" in windows  # counted from position 0
        if (
            not self._builder
            and len(rows) == len(keys)
            and bool((keys.diff() == 1).all())
            and not (has_runs and keys[0] > 0)
        ):
            return None  # in an empty cache and without gaps, transformers' own masks are right, and free
        slots = torch.arange(len(keys), device=keys.device)
        own = slots[len(keys) - len(rows) :, None]
        # of two tokens at one position, the later one in the cache sees the other
        hidden = (keys > rows[:, None]) | ((keys == rows[:, None]) & (slots > own))
        masks = {}
        for kind, window in windows.items():
            unseen = (
                hidden if window is None else hidden | (keys < window.first_seen(rows[:, None]))
            )
            masks[kind] = self._additive(unseen)
        return masks if len(masks) > 1 else masks.popitem()[1]

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """``hidden`` ``[s, k]`` as ``[1, 1, s, k]``, 0 or the smallest number of the model's dtype."""
        if len(hidden) == 1 and not self._builder and not bool(hidden.any()):
            return None  # a decoded token that sees every key
        dtype = self.model.dtype
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]


_keys: ContextVar[torch.Tensor | None] = ContextVar("blendrag_alibi_keys", default=None)
"""Positions of the keys of the forward under way, ``[k]``."""


@contextmanager
def _alibi_by_position(base: nn.Module, name: str) -> Iterator[None]:
    """Within this context and thread, ``base`` builds its ALiBi tensor from the positions of the keys."""
    stock: Callable[..., torch.Tensor] = getattr(base, name)

    def build(*args: Any, **kwargs: Any) -> torch.Tensor:
        keys = _keys.get()
        if keys is None:
            return stock(*args, **kwargs)
        if name == "build_alibi_tensor":  # BLOOM: mask, heads, dtype
            pair = torch.ones((1, 2), device=keys.device)
            unit = stock(pair, args[1], dtype=torch.float32)
        else:  # MPT: heads, length
            unit = stock(args[0], 2, **{k: v for k, v in kwargs.items() if k == "device"})
        slopes = unit[..., 1:] - unit[..., :1]  # [H, 1, 1]
        if name != "build_alibi_tensor":
            return slopes * (keys - keys.max())
        batch = args[0].shape[0]
        return (slopes * keys).repeat(batch, 1, 1).to(kwargs.get("dtype", torch.float32))

    token = _keys.set(None)
    try:
        with replaced(base, name, build):
            yield
    finally:
        _keys.reset(token)
