"""The adapter around one unmodified Hugging Face causal LM.

It knows the model's structure, KV layout, identity and tokenizers, moves keys to other positions, and
encodes a chunk after its prefix. It puts the model into eval mode and changes nothing else, but in models
that keep running states in their modules (:mod:`blendrag.model.own_states`). A model whose
KV cannot be moved still gets an adapter: ``refusal`` says why, and :meth:`require_blendable` raises it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from blendrag.errors import InvalidInputError, UnsupportedModelError, is_out_of_memory
from blendrag.model import composition, continuation, fingerprint, measurements
from blendrag.model.compat import attention_name, is_compiled, origin, unwrapped
from blendrag.model.composition import RECORD_VERSION, Composition, CompositionChecks
from blendrag.model.continuation import Continuation, ContinuationChecks
from blendrag.model.length_tables import LongRotary, long_table, own_tables
from blendrag.model.positions import PROBE_OFFSETS, LayersKV, Repositioner, classify
from blendrag.model.sharing import lock_of
from blendrag.model.structure import (
    USE_FULL,
    USE_PREFIX,
    Decoder,
    DecoderStack,
    check_placement,
    find_stack,
    input_device,
    layout_of,
    uncompiled,
    unsupported_if_raising,
)
from blendrag.model.tokens import Tokens
from blendrag.store.identity import ModelIdentity, digest_fields
from blendrag.store.kv import ChunkKV, KVLayout, dtype_name

log = logging.getLogger(__name__)

PROBE_TOKENS = 8
#: The id of models whose config has no name.
UNNAMED = "unnamed"


class ModelAdapter:
    """A causal LM with its tokenizer. Thread-safe only under :attr:`lock`."""

    def __init__(self, model: Any, tokenizer: Any, model_id: str = "") -> None:
        model = unwrapped(model)
        if not hasattr(model, "config") or not hasattr(model, "generate"):
            raise InvalidInputError(
                f"the model is a {type(model).__name__}, expected a causal LM of transformers; if it wraps "
                "one, pass that (model.module)"
            )
        if getattr(model.config, "is_encoder_decoder", False):
            raise InvalidInputError(
                f"the model is a {type(model).__name__}, whose encoder reads the prompt; expected a causal LM"
            )
        peft = getattr(model, "active_peft_config", None) if hasattr(model, "peft_type") else None
        learns_prompt = getattr(peft, "is_prompt_learning", False)
        unwrap = hasattr(model, "get_base_model") and not learns_prompt
        self.model = unwrapped(model.get_base_model()) if unwrap else model
        self.model.eval()
        name, self.revision = origin(model.config)
        self.model_id = model_id or name or UNNAMED
        self.tokens = tokenizer if isinstance(tokenizer, Tokens) else Tokens(tokenizer)
        self.lock = lock_of(self.model)
        """Belongs to the model, not to this adapter. Held from the first hook to the last token."""
        self.why_not_movable = ""
        """Why the KV of a refused model cannot be moved, without the remedy."""
        self.continuation: Continuation | None = None
        """How a refused model goes on from stored beginnings of prompts; ``None`` if it cannot."""
        self.composition: Composition | None = None
        """How chunks of a model with running states are encoded and composed; ``None`` for other models."""
        self._stack: DecoderStack | None = None
        self._layout: KVLayout | None = None
        self._repositioner: Repositioner | None = None
        self._long: Repositioner | None = None
        """That of LongRoPE's table for long sequences."""
        self._identity: ModelIdentity | None = None
        self._identified: Hashable = None
        self._digests = fingerprint.Digests()
        try:
            if learns_prompt:
                raise UnsupportedModelError(
                    "prompt-learning adapters put extra tokens before every prompt, so its chunks cannot "
                    "be placed; use mode full"
                )
            with unsupported_if_raising(type(self.model).__name__):
                self._probe()
        except UnsupportedModelError as refused:
            self.why_not_movable = str(refused).partition(f"; {USE_FULL}")[0]
            if not learns_prompt:
                self._find_continuation()
                self._find_composition()

    @property
    def device(self) -> torch.device:
        return input_device(self.model)

    @property
    def precision(self) -> torch.dtype:
        """The dtype whose numerical noise the model has.

        bfloat16 for quantised models: they may compute in it, or round activations to 8 bits, whatever dtype
        their KV has.
        """
        return torch.bfloat16 if fingerprint.is_quantised(self.model) else self.layout.torch_dtype

    @property
    def context_tokens(self) -> int:
        return context_tokens_of(self.model.config)

    @property
    def blend_limit_tokens(self) -> int | None:
        """Longest prompt before the rotary table changes (dynamic, LongRoPE) or queries are scaled by their
        position (Llama 4, Ministral 3), or ``None``."""
        if self._stack is None and self._rotary is None:
            return None
        config = self.model.config.get_text_config(decoder=True)
        name = "original_max_position_embeddings"
        if getattr(config, "attn_temperature_tuning", False):
            # Llama 4 counts the position from the cache, which has the prompt before its last row
            return min(int(config.floor_scale) - 2, self.context_tokens)
        parameters = getattr(config, "rope_parameters", None) or {}
        changes = fingerprint.depends_on_length(self._rotary)
        if not changes and not parameters.get("llama_4_scaling_beta"):
            return None
        if parameters.get("rope_type") == "dynamic":
            return int(config.max_position_embeddings)  # transformers looks at nothing else
        return int(parameters.get(name) or getattr(config, name, None) or self.context_tokens)

    @property
    def beyond_blend_limit(self) -> str:
        """What changes beyond :attr:`blend_limit_tokens`, after "this model's"."""
        if fingerprint.depends_on_length(self.stack.rotary):
            return "rotary table changes with the length"
        return "queries are scaled by their position"

    def is_long(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens is computed in another way than the chunks of shorter ones."""
        limit = self.blend_limit_tokens
        return limit is not None and tokens > limit

    @property
    def has_long_table(self) -> bool:
        """Whether all long prompts have the same table (LongRoPE), so that KV can be kept for them."""
        return self._long is not None

    def own_tables(self) -> AbstractContextManager[None]:
        """Within this context no forward is rotated by a table that another one left (dynamic)."""
        return own_tables(self._rotary)

    @property
    def _rotary(self) -> nn.Module | None:
        if self._stack is not None:
            return self._stack.rotary
        return None if self.continuation is None else self.continuation.rotary

    def require_blendable(self) -> None:
        """Raise :class:`UnsupportedModelError` if this model's KV cannot be reused."""
        if self.refusal is not None:
            raise UnsupportedModelError(f"{self.model_id}: {self.refusal}")

    @property
    def stack(self) -> DecoderStack:
        self.require_blendable()
        assert self._stack is not None
        return self._stack

    @property
    def layout(self) -> KVLayout:
        self.require_blendable()
        assert self._layout is not None
        return self._layout

    @property
    def repositioner(self) -> Repositioner:
        self.require_blendable()
        assert self._repositioner is not None
        return self._repositioner

    def repositioner_of(self, tokens: int) -> Repositioner:
        """The one for a prompt of so many tokens."""
        if not self.is_long(tokens):
            return self.repositioner
        assert self._long is not None
        return self._long

    @property
    def refusal(self) -> str | None:
        """Why this model's KV cannot be reused, and what to do; ``None`` if it can."""
        if not self.why_not_movable:
            return None
        return f"{self.why_not_movable}; {USE_FULL if self.continuation is None else USE_PREFIX}"

    @property
    def fuses(self) -> bool:
        """Whether tokens of chunks can be recomputed among others that are loaded (:mod:`blendrag.fusor`)."""
        return self.refusal is None and self.composition is None

    def require_fusing(self) -> None:
        """Raise :class:`UnsupportedModelError` unless the model :attr:`fuses`."""
        self.require_blendable()
        if self.composition is not None:
            raise UnsupportedModelError(
                f"{self.model_id} has layers with running states, so its chunks are only recomputed from "
                "their beginning on; this works for models of attention alone"
            )

    def require_mode(self, mode: str) -> None:
        """Raise :class:`UnsupportedModelError` if requests of that mode cannot be answered."""
        if mode != "full" and not (mode == "prefix" and self.continuation is not None):
            self.require_blendable()

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        """The decoder layers that may be hooked; empty for a compiled model or if none were found."""
        if self.is_compiled:
            return []
        if self._stack is not None:
            return list(self._stack.layers)
        return [] if self.continuation is None else self.continuation.layers

    @property
    def is_compiled(self) -> bool:
        """Whether ``torch.compile`` was applied to the model, its decoder or a decoder layer."""
        modules = self.model.modules() if self._stack is None else self._stack.may_be_compiled
        return any(map(is_compiled, modules))

    def uncompiled(self) -> AbstractContextManager[None]:
        """Within this context a compiled model runs as plain Python."""
        return uncompiled() if self.is_compiled else nullcontext()

    def weights_now(self) -> Hashable:
        """Changes when other weights or adapters are loaded; hashes nothing.

        Raises :class:`UnsupportedModelError` for weights that are not visible as tensors.
        """
        return self._weights(fingerprint.loaded(self.model))

    @property
    def identified_weights(self) -> Hashable:
        """:meth:`weights_now` when :attr:`identity` was last read; looks at no tensor."""
        return self._identified

    def _weights(self, found: fingerprint.Loaded) -> tuple[Any, ...]:
        """Marks of the tensors, then what else changes what they compute."""
        attention = attention_name(self.model.config)
        return self._digests.marks(found), found.adapters, self.model.dtype, attention

    @property
    def identity(self) -> ModelIdentity:
        """Identity of what is loaded *now*: changed weights and adapters are hashed again.

        Waits for a request in progress.
        """
        with self.lock:
            self.require_blendable()
            if dtype_name(self.model.dtype) != self.layout.dtype:
                # the model was converted: K and V have another dtype now
                if self.composition is None:
                    self._probe()
                else:
                    self._find_composition()
                self.require_blendable()
            return self.identity_over(self.stack, self.layout)

    def identity_over(self, decoder: Decoder, layout: KVLayout) -> ModelIdentity:
        """:attr:`identity` of a model with this ``decoder`` and ``layout``, blendable or not."""
        with self.lock:
            found = fingerprint.loaded(self.model)
            config = self.model.config
            identified = self._weights(found)
            if self._identity is None or identified != self._identified:
                composes = self.composition is not None and layout.has_states
                records = f" records {RECORD_VERSION}" if composes else ""
                self._identity = ModelIdentity(
                    model_id=self.model_id,
                    revision=self.revision,
                    tensors_fingerprint=self._digests.fingerprint(found, identified[0]),
                    adapters=found.adapters,
                    weight_quantization=fingerprint.weight_quantization(config),
                    compute_dtype=dtype_name(self.model.dtype),
                    attention=str(attention_name(config)),
                    geometry=fingerprint.geometry(decoder.config, decoder.layer_types) + records,
                    tokenizer_fingerprint=self.tokens.fingerprint,
                    stored_dtype=layout.dtype,
                )
            self._identified = identified
            return self._identity

    @torch.inference_mode()
    def encode(
        self,
        prefix_ids: Sequence[int],
        chunk_ids: Sequence[int],
        is_long: bool = False,
        context_ids: Sequence[int] = (),
    ) -> ChunkKV:
        """KV of ``chunk_ids`` prefilled after ``prefix_ids`` and ``context_ids``, on the CPU, without these.

        Keys are rotated to positions ``[len(prefix_ids), …)``, with ``is_long`` by the table of long prompts
        (:attr:`has_long_table`). The caller holds the lock. Raises
        :class:`InvalidInputError` for an empty or too long chunk, and :class:`UnsupportedModelError`.
        """
        if not chunk_ids:
            raise InvalidInputError("chunk of 0 tokens cannot be encoded; drop it before ingest")
        layout = self.layout
        skip, tokens = len(prefix_ids) + len(context_ids), len(chunk_ids)
        limit = self.encoded_alike(is_long)
        if skip + tokens > limit:
            raise InvalidInputError(
                f"a chunk of {tokens} tokens after a prefix of {skip} exceeds the {limit} tokens that "
                "this model encodes alike; take shorter chunks (chunk_tokens)"
            )
        if self.composition is not None:
            before = [*prefix_ids, *context_ids]
            with self.uncompiled(), self.own_tables():
                kv = self.composition.encode(before, chunk_ids, 0, -len(context_ids))
            return replace(kv, layers=_on_host(kv.layers))
        with self._long_table() if is_long else nullcontext():
            ids = [*prefix_ids, *context_ids, *chunk_ids]
            cache = self.prefill_at(ids, after_kv=end_forward)
        layers = [
            shape.joined(layer.keys[0, :, skip:], layer.values[0, :, skip:])
            for shape, layer in zip(layout.layers, cache.layers, strict=True)
        ]
        if context_ids:
            self._move_(layers, -len(context_ids), is_long)
        return ChunkKV(layout, tokens, _on_host([layer.to(layout.torch_dtype) for layer in layers]))

    @torch.inference_mode()
    def taken(self, buffers: Sequence[torch.Tensor], start: int, position: int) -> ChunkKV:
        """A copy of the KV that ``buffers``, one per layer as in :class:`LayerShape`, hold from token
        ``start`` on, on the CPU, with keys moved from there to ``position``."""
        layers = [buffer[..., start:, :].clone() for buffer in buffers]
        self._move_(layers, position - start, is_long=False)
        return ChunkKV(self.layout, layers[0].shape[2], _on_host(layers))

    def _move_(self, layers: Sequence[torch.Tensor], offset: int, is_long: bool) -> None:
        """Move the keys of ``layers``, each as in :class:`LayerShape`, by ``offset`` positions in place."""
        repositioner = self._long if is_long else self.repositioner
        assert repositioner is not None
        tokens = layers[0].shape[2]
        tables = repositioner.tables(torch.full((tokens,), offset, device=self.device))
        for i, (shape, layer) in enumerate(zip(self.layout.layers, layers, strict=True)):
            repositioner.rotate_(shape.split(layer)[repositioner.part(i)], i, tables)

    def encoded_alike(self, is_long: bool = False) -> int:
        """Most tokens of a chunk and what precedes it, so that its KV does not depend on their number."""
        limit = self.context_tokens
        return limit if is_long else min(limit, self.blend_limit_tokens or limit)

    def prefill_at(
        self,
        ids: Sequence[int],
        offset: int = 0,
        after_kv: Callable[[], None] | None = None,
    ) -> DynamicCache:
        """KV of ``ids`` at positions ``offset``….

        The LM head is not run; sliding-window layers keep every token. ``after_kv``: called in the forward
        when the last layer has K and V; may end it by :class:`KVComplete`.
        """
        return self._prefill([ids], [range(offset, offset + len(ids))], after_kv)

    def _prefill(
        self,
        ids: Sequence[Sequence[int]],
        at: Sequence[Sequence[int]],
        after_kv: Callable[[], None] | None = None,
    ) -> DynamicCache:
        """KV of texts of one length, each of whose tokens is at its position."""
        assert self._stack is not None
        # With a config, sliding-window layers would keep only window-1 tokens.
        cache = (
            DynamicCache() if after_kv is None else _NoticedCache(len(self.layout.layers), after_kv)
        )
        batch = torch.tensor([list(row) for row in ids], device=self.device)
        positions = torch.tensor([list(row) for row in at], device=self.device)
        with self.uncompiled(), self.own_tables(), suppress(KVComplete):
            self._stack.base(
                input_ids=batch, position_ids=positions, past_key_values=cache, use_cache=True
            )
        return cache

    def _prefilled_once(
        self, ids: Sequence[Sequence[int]], at: Sequence[Sequence[int]]
    ) -> list[DynamicCache]:
        """:meth:`_prefill` in one forward, as each reads all weights; in several for a model that takes only
        one text."""
        try:
            return [self._prefill(ids, at)]
        except Exception as exc:
            if isinstance(exc, TypeError) or is_out_of_memory(exc):
                raise
            return [self._prefill([row], [places]) for row, places in zip(ids, at, strict=True)]

    @torch.inference_mode()
    def _find_continuation(self) -> None:
        """Measure whether the refused model can go on from a stored beginning."""
        try:
            check_placement(self.model)
            key = self._measured_key(f"continuation {continuation.CHECKS_VERSION}")
            known = measurements.recall(key, ContinuationChecks)
            with self.uncompiled():
                self.continuation = Continuation(self.model, self.device, known)
            if self.continuation.checks != known:
                measurements.remember(key, self.continuation.checks)
        except UnsupportedModelError as exc:
            log.debug("no beginnings of prompts are reused: %s", exc)

    def _measured_key(self, what: str) -> str:
        """Names ``what`` was measured of the model as it is loaded now.

        Raises :class:`UnsupportedModelError` for weights that cannot be seen to change.
        """
        found, config = fingerprint.loaded(self.model), self.model.config
        # its code need not be transformers' own
        code = Path(getattr(sys.modules[type(self.model).__module__], "__file__", None) or "")
        text = config.get_text_config(decoder=True)
        parts = (
            type(self.model).__qualname__,
            code.read_text(encoding="utf-8") if code.is_file() else "",
            self._digests.fingerprint(found, self._digests.marks(found)),
            found.adapters,
            fingerprint.weight_quantization(config),
            str(self.model.dtype),
            str(attention_name(config)),
            fingerprint.geometry(text, getattr(text, "layer_types", None) or ()),
        )
        digest = digest_fields(part.encode() for part in parts)
        return measurements.key_of(what, digest, self.device)

    @torch.inference_mode()
    def _find_composition(self) -> None:
        """Measure whether chunks of a model with running states can be composed."""
        self.composition = None
        if self.continuation is None or not self.continuation.has_states:
            return
        name = type(self.model).__name__
        reach = self.blend_limit_tokens or self.context_tokens
        try:
            key = self._measured_key(f"composition {composition.CHECKS_VERSION}")
            known = measurements.recall(key, CompositionChecks)
            with self.uncompiled(), unsupported_if_raising(name, "compose stored chunks"):
                found = Composition(self.model, self.continuation, self.device, reach, known)
        except UnsupportedModelError as exc:
            self.why_not_movable = str(exc).partition(f"; {USE_FULL}")[0]
            return
        if found.checks != known:
            measurements.remember(key, found.checks)
        self.composition, self.why_not_movable = found, ""
        self._stack, self._layout, self._repositioner = (
            found.stack,
            found.layout,
            found.repositioner,
        )

    @torch.inference_mode()
    def _probe(self) -> None:
        """Measure layout and position dependence; raises :class:`UnsupportedModelError`."""
        check_placement(self.model)
        if fingerprint.is_quantised(self.model):
            self._finish_weights()
        fingerprint.loaded(self.model)  # raises for weights that have no fingerprint
        self._stack = stack = find_stack(self.model)
        vocab = self.model.get_input_embeddings().num_embeddings
        ids, different = (
            [(first + step * i) % vocab for i in range(PROBE_TOKENS)]
            for first, step in ((17, 31), (5, 97))
        )
        # Learned positions end with their table, and a length-dependent table changes at its limit.
        reach = (self.blend_limit_tokens or self.context_tokens) - PROBE_TOKENS
        deltas = sorted({max(1, min(delta, reach)) for delta in PROBE_OFFSETS})
        counted = [range(at, at + PROBE_TOKENS) for at in (0, *deltas, 0)]
        texts = [*[ids] * (1 + len(deltas)), different, ids[:1] * PROBE_TOKENS]
        at = [*counted, [0] * PROBE_TOKENS]
        try:
            caches = self._prefilled_once(texts, at)
        except TypeError as exc:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} takes no position_ids, so its KV cannot be placed; "
                "use mode full"
            ) from exc
        name = type(self.model).__name__
        self._layout = layout_of(caches[0], len(stack.layers), PROBE_TOKENS, name)
        first, *moved, others, still = (
            [(layer.keys[row], layer.values[row]) for layer in cache.layers]
            for cache in caches
            for row in range(len(cache.layers[0].keys))
        )

        def kv_at(offset: int, ids: Sequence[int] = ids) -> LayersKV:
            cache = self.prefill_at(ids, offset)
            return [(layer.keys[0], layer.values[0]) for layer in cache.layers]

        again = None
        if fingerprint.is_quantised(self.model):
            longer = kv_at(0, ids + ids[::-1])
            again = [(keys[:, :PROBE_TOKENS], values[:, :PROBE_TOKENS]) for keys, values in longer]
        self._long = None
        if getattr(stack.rotary, "rope_type", None) == "longrope":
            with suppress(UnsupportedModelError, TypeError, ValueError, IndexError, RuntimeError):
                self._probe_long(kv_at, others, still)
        shifted = dict(zip(deltas, moved, strict=True))
        self._repositioner = classify(first, shifted, others, still, stack, self.precision, again)

    def _probe_long(
        self, kv_at: Callable[..., LayersKV], others: LayersKV, still: LayersKV
    ) -> None:
        """Check that KV of the table for long prompts can be computed at the beginning and moved."""
        stack, limit = self.stack, self.blend_limit_tokens
        assert limit is not None
        assert stack.rotary is not None
        beyond = kv_at(limit)  # by the model itself
        with self._long_table():
            found = classify(kv_at(0), {limit: beyond}, others, still, stack, self.precision)
        self._long = replace(found, rotary=LongRotary(stack.rotary, limit))

    def _long_table(self) -> AbstractContextManager[None]:
        limit, rotary = self.blend_limit_tokens, self.stack.rotary
        assert limit is not None
        assert rotary is not None
        return long_table(rotary, limit)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _finish_weights(self) -> None:
        """Run the whole model once: compressed-tensors and bitsandbytes unpack or repack weights then."""
        with uncompiled():
            self.model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=self.device))


class KVComplete(Exception):
    """Ends a forward of which only K and V are needed."""


def end_forward() -> None:
    raise KVComplete


class _NoticedCache(DynamicCache):
    """A cache that calls ``after_kv`` when so many layers have K and V."""

    def __init__(self, layers: int, after_kv: Callable[[], None]) -> None:
        super().__init__()
        self._last, self._after_kv = layers - 1, after_kv

    def update(  # models of other authors may name the arguments
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self._last:
            self._after_kv()
        return kept


def context_tokens_of(config: Any) -> int:
    """Context window in tokens of a model with this ``config``.

    ``max_position_embeddings`` is the original length where a dynamic table stretches it.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    parameters = getattr(text, "rope_parameters", None) or {}
    stretch = (parameters.get("factor") or 1) if parameters.get("rope_type") == "dynamic" else 1
    return int(limit * max(1, stretch)) if limit and limit > 0 else 1 << 20  # XLNet says -1


def _on_host(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``layers`` in host memory: from a GPU through pinned memory, which takes a tenth of the time."""
    if not layers[0].is_cuda:
        return [layer.cpu() for layer in layers]
    host = [torch.empty_like(layer, device="cpu", pin_memory=True) for layer in layers]
    for there, layer in zip(host, layers, strict=True):
        there.copy_(layer, non_blocking=True)
    torch.cuda.current_stream(layers[0].device).synchronize()
    return host
