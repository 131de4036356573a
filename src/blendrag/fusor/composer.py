"""One forward for all tokens of a hybrid model's prompt that are not stored.

The reference is :func:`composed_in_order`, a forward for each part that is computed, which reads the weights
once for each. Here all parts are one sequence, whose order counts within the layers only:

* a layer of attention writes their K and V between those of the chunks, and gets a mask by position;
* a layer with a running state is called once for each part, and what a chunk does to the state is done
  between these calls.

The model is not changed: hooks and replaced methods serve one forward and are removed in ``finally``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache

from blendrag.errors import is_out_of_memory
from blendrag.fusor.attention import NAME, ROWS_KEYWORD, implementation
from blendrag.fusor.chunk_repair import computed_runs
from blendrag.fusor.loader import HeldKV, LoadedSpan, reading
from blendrag.fusor.pack import output_like, replayed
from blendrag.fusor.rows import Rows
from blendrag.fusor.scout import Observed, Scout, scouting
from blendrag.model import linear_layers
from blendrag.model.adapter import ModelAdapter
from blendrag.model.composition import ComposedLayer, Composition
from blendrag.model.kv_compare import LOGIT_TOLERANCE, difference_of
from blendrag.model.linear_layers import LayerRecord, LinearLayer, MixerRun, RunningStates
from blendrag.model.sharing import is_given, replaced
from blendrag.model.windows import Window
from blendrag.store.kv import dtype_name

#: What a forward is given.
Arguments = tuple[Any, dict[str, Any]]
#: Counts up when something else is measured, so that earlier results are not used.
CHECKS_VERSION = 2
#: Tokens of two forwards that tell which arguments of layers have an entry for each.
COUNTED_TOKENS = 5, 7
#: The prompt on which both ways are compared, and its chunks.
CHECKED_TOKENS, CHECKED_CHUNKS = 26, ((4, 11), (13, 20))


class Stretch(NamedTuple):
    """Tokens of the prompt that are computed, or what is loaded of a chunk."""

    start: int
    end: int
    chunk: int | None = None
    """Which of the loaded spans it is."""


@dataclass(frozen=True)
class ComposedPrompt:
    """A prompt whose decoder has run."""

    cache: Cache
    """It holds all tokens of the prompt."""
    output: Any
    """What the decoder would have returned; ``last_hidden_state`` is the last row, ``[1, 1, D]``."""
    load_s: float
    recomputed: tuple[int, ...] = ()
    """Tokens that were computed of each loaded span that is not exact."""
    scouted_tokens: int = 0
    """Tokens that were computed to observe attention."""

    @contextmanager
    def replayed(self, base: nn.Module) -> Iterator[Cache]:
        """Within this context the decoder's first forward returns this prefill. Yields the cache, which seems
        empty until then, because callers take its length for that of the prompt so far."""
        with_kv = (each for each in self.cache.layers if getattr(each, "keys", None) is not None)
        held: list[Any] = [(layer, layer.keys, layer.values) for layer in with_kv]

        def show() -> None:
            for layer, keys, values in held:
                layer.keys, layer.values = keys, values

        for layer, keys, values in held:
            layer.keys, layer.values = keys[:, :, :0], values[:, :, :0]
        with replayed(base, self.output, show):
            yield self.cache


class _Prompt:
    """One prompt within its forward."""

    def __init__(
        self,
        composition: Composition,
        tokens: int,
        spans: Sequence[LoadedSpan],
        device: torch.device,
        by_token: Mapping[str, int],
    ) -> None:
        """``by_token``: see :attr:`ComposerChecks.by_token`."""
        self.composition, self.tokens, self.spans = composition, tokens, spans
        self._by_token = by_token
        self._device = device
        self.divide({})
        self.cache = composition.new_cache()
        self.records: dict[LinearLayer, list[LayerRecord]] = {}
        """Of each module that writes running states, for each span."""

    def divide(self, computed: Mapping[int, int]) -> None:
        """Divide the prompt into stretches. ``computed``: the first tokens of a chunk, by its number."""
        self.stretches, at = list[Stretch](), 0
        for number, span in enumerate(self.spans):
            loaded = span.start + computed.get(number, 0)
            if loaded == span.end:
                continue
            for cut in (span.start, loaded):  # a run of the chunk is a stretch by itself
                if cut > at:
                    self.stretches.append(Stretch(at, cut))
                    at = cut
            self.stretches.append(Stretch(loaded, span.end, number))
            at = span.end
        self.stretches.append(Stretch(at, self.tokens))
        parts = [torch.arange(s.start, s.end) for s in self.stretches if s.chunk is None]
        self.positions = torch.cat(parts).to(self._device)
        """Of the tokens that are computed, ``[F]``."""
        self.rows = Rows(self.positions, self.tokens)

    def load(self) -> float:
        """Read what is stored into place; returns the seconds.

        Raises :class:`SpanCorruptError`.
        """
        composition, began = self.composition, time.perf_counter()
        layout, on_cpu = composition.layout, self.positions.device.type == "cpu"
        kv: list[tuple[ComposedLayer, torch.Tensor]] = []
        for number, layer in enumerate(composition.entries):
            shape, dtype = layer.shape, layout.layer_dtype(number)
            if layer.linear is not None:
                records = [torch.empty(shape.tensor_shape(0), dtype=dtype) for _ in self.spans]
                for span, record in zip(self.spans, records, strict=True):
                    with reading(span):
                        span.reader.read_layer(number, record)
                moved = (record.to(self.positions.device) for record in records)
                self.records[layer.linear] = [*map(layer.linear.unpacked, moved)]
                continue
            buffer = torch.empty(
                shape.tensor_shape(self.tokens), dtype=dtype, device=self.positions.device
            )
            for span in self.spans:
                there = buffer[:, :, span.start : span.end]
                read = there if on_cpu else torch.empty(there.shape, dtype=dtype)
                with reading(span):
                    span.reader.read_layer(number, read)
                if not on_cpu:
                    there.copy_(read)
            kv.append((layer, buffer))
            held, (keys, values) = self.cache.layers[layer.index], shape.split(buffer)
            held.keys, held.values = keys[None], values[None]
        load_s = time.perf_counter() - began
        moves = composition.repositioner
        for span in self.spans:
            if not span.offset:
                continue
            tables = moves.tables(
                torch.full((span.tokens,), span.offset, device=self.positions.device)
            )
            for layer, buffer in kv:
                turned = layer.shape.split(buffer)[moves.part(layer.attention)]
                moves.rotate_(turned[:, span.start : span.end], layer.attention, tables)
        return load_s

    def reset(self) -> None:
        """Empty the running states, for another forward."""
        for layer in self.composition.entries:
            if layer.linear is not None:
                recurrent, conv = layer.linear.held(self.cache)
                emptied = (tuple(map(torch.zeros_like, states)) for states in (recurrent, conv))
                layer.linear.put(self.cache, RunningStates(*emptied))

    def mask(self, window: Window | None, dtype: torch.dtype) -> torch.Tensor:
        """What each computed token sees, ``[1, 1, F, N]``: 0, or the smallest number."""
        rows = self.positions[:, None]
        keys = torch.arange(self.tokens, device=rows.device)
        seen = keys[None] <= rows
        if window is not None:
            seen &= keys[None] >= window.first_seen(rows)
        zero = torch.zeros(seen.shape, dtype=dtype, device=rows.device)
        return zero.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]

    # -- within the layers ------------------------------------------------------------------------

    def scatter(self, held: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """Instead of ``update`` of a layer of the cache: new K and V go between those of the chunks."""

        def update(
            keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            held.keys.index_copy_(2, self.positions, keys)
            held.values.index_copy_(2, self.positions, values)
            return held.keys, held.values

        return update

    def in_parts(self, linear: LinearLayer, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Instead of ``forward`` of a layer with a running state: once for each part of this prompt, with
        what the chunks do between."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not is_given(self.cache, args, kwargs):
                return forward(*args, **kwargs)
            outputs, at = [], 0
            for start, end, chunk in self.stretches:
                if chunk is not None:
                    record, span = self.records[linear][chunk], self.spans[chunk]
                    if start == span.start:
                        before = linear.held(self.cache)
                    linear.put(self.cache, linear.after(record, before, span.tokens))
                    continue
                before = linear.held(self.cache)  # a chunk's, if this is a run of it
                rows = slice(at, at := at + end - start)
                part = functools.partial(_part, rows=rows, by_token=self._by_token)
                some = [part(str(place), value) for place, value in enumerate(args)]
                named = {name: part(name, value) for name, value in kwargs.items()}
                if "attention_mask" in named:
                    named["attention_mask"] = None
                outputs.append(forward(*some, **named))
            return linear_layers.joined(outputs)

        return run


def _part(name: str, value: Any, rows: slice, by_token: Mapping[str, int]) -> Any:
    """The entries of the argument ``name`` for these ``rows``, if it has one for each token."""
    if isinstance(value, tuple):
        return tuple(_part(f"{name}.{i}", each, rows, by_token) for i, each in enumerate(value))
    if name not in by_token or not isinstance(value, torch.Tensor):
        return value
    return value.narrow(by_token[name], rows.start, rows.stop - rows.start)


def _shapes(name: str, value: Any) -> Iterator[tuple[str, torch.Size]]:
    """Those of the tensors in the argument ``name``, by the names that :func:`_part` gives them."""
    if isinstance(value, tuple):
        for i, each in enumerate(value):
            yield from _shapes(f"{name}.{i}", each)
    elif isinstance(value, torch.Tensor):
        yield name, value.shape


@dataclass(frozen=True)
class ComposerChecks:
    """What a :class:`Composer` has measured of a model."""

    fast_attention: bool
    """Whether :func:`blend_attention` serves the model, instead of its own with masks."""
    serves: bool
    """Whether :meth:`Composer.prefill` can be used; else the reference is."""
    observes: bool
    """Whether the question's attention can be seen."""
    by_token: Mapping[str, int]
    """Arguments of layers with a running state that have an entry for each token, and in which dimension."""


def composed_in_order(
    composition: Composition,
    ids: torch.Tensor,
    spans: Sequence[LoadedSpan],
    check: Callable[[], None] = lambda: None,
) -> tuple[Cache, int, float]:
    """A cache over ``spans``, with a forward for each part of ``ids`` ``[1, N]`` that precedes one; where the
    rest of ``ids`` begins; and the seconds of reading.

    ``check`` is called before each span. Raises :class:`SpanCorruptError`.
    """
    cache, at, load_s = composition.new_cache(), 0, 0.0
    for span in spans:
        if span.start > at:
            composition.forward(ids[:, at : span.start], cache, at)
        check()
        began = time.perf_counter()
        with reading(span):
            record = composition.read(span.reader)
        load_s += time.perf_counter() - began
        composition.append(cache, record, span.tokens, span.offset)
        at = span.end
    return cache, at, load_s


class Composer:
    """Prefills of one hybrid model over stored chunks. The caller holds the model's lock."""

    def __init__(self, adapter: ModelAdapter, known: ComposerChecks | None = None) -> None:
        """Measures whether one forward gives what the reference does, if it is not ``known``."""
        assert adapter.composition is not None
        self._adapter, self._composition = adapter, adapter.composition
        windows = windows_of(adapter)
        self._windows = [windows[layer.index] for layer in self._composition.with_kv]
        self.fast_attention = self.serves = self.observes = True
        self._by_token: Mapping[str, int] = {}
        if known is None:
            self._measure()
        else:
            self.fast_attention, self.serves = known.fast_attention, known.serves
            self.observes, self._by_token = known.observes, known.by_token

    @property
    def checks(self) -> ComposerChecks:
        return ComposerChecks(self.fast_attention, self.serves, self.observes, self._by_token)

    def _measure(self) -> None:
        if not self._holds(self._finds_tokens):
            self.fast_attention = self.serves = self.observes = False
            return
        self.serves = self._holds(self._equals_reference)
        if not self.serves:
            self.fast_attention = False
            self.serves = self._holds(self._equals_reference)
        self.observes = self.serves and self._holds(self._sees_attention)

    def _holds(self, check: Callable[[], bool]) -> bool:
        """Whether the model passes ``check``; layers may raise anything there."""
        try:
            with self._adapter.lock, torch.inference_mode():
                return check()
        except Exception as exc:
            if is_out_of_memory(exc):
                raise
            return False

    def _finds_tokens(self) -> bool:
        """Find :attr:`ComposerChecks.by_token` from two forwards of different lengths; whether each argument
        has it in one dimension, the same in all layers."""
        composition, found = self._composition, dict[str, set[tuple[int, ...]]]()
        shapes: dict[tuple[nn.Module, str], torch.Size] = {}

        def note(call: MixerRun) -> None:
            given = {str(place): value for place, value in enumerate(call.args)}
            for name, value in (given | call.kwargs).items():
                for each, shape in _shapes(name, value):
                    before = shapes.setdefault((call.mixer, each), shape)
                    sizes = zip(before, shape, strict=True)
                    dims = tuple(dim for dim, (some, more) in enumerate(sizes) if some != more)
                    if dims and each != "attention_mask":
                        found.setdefault(each, set()).add(dims)

        linear = [entry.linear for entry in composition.entries if entry.linear is not None]
        mixers = [(layer.place, layer.mixer) for layer in linear]
        for tokens in COUNTED_TOKENS:
            ids, cache = torch.arange(tokens, device=self._adapter.device), composition.new_cache()
            with linear_layers.calls(mixers, cache, note):
                composition.forward(ids[None], cache, 0)
        dims = {name: [*each] for name, each in found.items()}
        self._by_token = {name: each[0][0] for name, each in dims.items()}
        return all(len(each) == len(each[0]) == 1 for each in dims.values())

    def _sees_attention(self) -> bool:
        ids, spans = self._checked_prompt()
        prompt = self._prompt(CHECKED_TOKENS, spans)
        prompt.load()
        return self._attended(prompt, ids, CHECKED_CHUNKS[-1][1]) is not None

    def _prompt(self, tokens: int, spans: Sequence[LoadedSpan]) -> _Prompt:
        device = self._adapter.device
        return _Prompt(self._composition, tokens, spans, device, self._by_token)

    def _checked_prompt(self) -> tuple[torch.Tensor, list[LoadedSpan]]:
        """Ids ``[1, N]`` and two chunks of them, for what is measured."""
        adapter, composition = self._adapter, self._composition
        vocab = adapter.model.get_input_embeddings().num_embeddings
        ids = [(43 + 47 * i + i * i) % vocab for i in range(CHECKED_TOKENS)]
        spans = [
            LoadedSpan(start, end, HeldKV(composition.encode(ids[:2], ids[start:end], 0)), 2, False)
            for start, end in CHECKED_CHUNKS
        ]
        return torch.tensor([ids], device=adapter.device), spans

    def _equals_reference(self) -> bool:
        """Whether both ways give the same logits, on a prompt of two chunks."""
        adapter, composition = self._adapter, self._composition
        given, spans = self._checked_prompt()
        cache, at, _ = composed_in_order(composition, given, spans)
        expected = composition.forward(given[:, at:], cache, at)
        prompt = self.prefill(given, spans)
        with prompt.replayed(adapter.stack.base) as cache:
            found = adapter.model(input_ids=given, past_key_values=cache, use_cache=True).logits
        scale = float(expected.abs().max()) or 1.0
        allowed = LOGIT_TOLERANCE[dtype_name(adapter.precision)] * scale
        return difference_of(found[0, -1:], expected) <= allowed

    @torch.inference_mode()
    def prefill(
        self,
        ids: torch.Tensor,
        spans: Sequence[LoadedSpan],
        ratio: float = 0.0,
        question_start: int = 0,
    ) -> ComposedPrompt:
        """Compute the tokens of ``ids`` ``[1, N]`` that are in none of ``spans``, among them the last one.

        ``ratio``: at most this share of the spans' tokens is computed, too, in runs that are chosen by the
        attention of the tokens from ``question_start`` on. Raises :class:`SpanCorruptError` if bytes fail
        verification.
        """
        prompt = self._prompt(ids.shape[1], spans)
        load_s, runs, scouted = prompt.load(), dict[int, int](), 0
        if ratio and not all(span.exact for span in spans):
            attention = None
            if ratio < 1 and self.observes:
                scouted = len(prompt.positions)
                attention = self._attended(prompt, ids, question_start)
            runs = computed_runs(spans, ratio, attention)
            prompt.divide(runs)
        with ExitStack() as attends:
            if self.fast_attention:
                attends.enter_context(implementation(self._adapter.stack, NAME))
            output = self._forward(prompt, ids, has_masks=not self.fast_attention)
        last = output.last_hidden_state[:, -1:]  # [1, 1, D]
        made = output_like(output, prompt.cache, last_hidden_state=last)
        recomputed = (runs.get(i, 0) for i, s in enumerate(spans) if not s.exact)
        return ComposedPrompt(prompt.cache, made, load_s, tuple(recomputed), scouted)

    def _attended(
        self, prompt: _Prompt, ids: torch.Tensor, question_start: int
    ) -> torch.Tensor | None:
        """The attention ``[N]`` that the question pays to each token over the chunks as they are stored;
        ``None`` if it is not seen."""
        asking = min(len(prompt.positions), max(1, ids.shape[1] - question_start))
        scout = Scout(asking, rows=prompt.rows)
        with scouting(self._adapter.stack, lambda: [Observed(scout)]):
            self._forward(prompt, ids)
        prompt.reset()
        return scout.attention

    def _forward(self, prompt: _Prompt, ids: torch.Tensor, has_masks: bool = False) -> Any:
        """What the decoder returns for computed tokens. Without masks, its attention knows the rows."""
        with self._hooked(prompt, has_masks):
            return self._adapter.stack.base(
                input_ids=ids[:, prompt.positions],
                position_ids=prompt.positions[None],
                past_key_values=prompt.cache,
                use_cache=True,
            )

    @contextmanager
    def _hooked(self, prompt: _Prompt, has_masks: bool) -> Iterator[None]:
        composition, stack = self._composition, self._adapter.stack
        masks: dict[Window | None, torch.Tensor] = {}

        def masked(window: Window | None) -> Callable[..., Arguments | None]:
            def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Arguments | None:
                if not is_given(prompt.cache, args, kwargs):
                    return None
                if not has_masks:
                    return args, {**kwargs, "attention_mask": None, ROWS_KEYWORD: prompt.rows}
                if window not in masks:
                    masks[window] = prompt.mask(window, self._adapter.model.dtype)
                return args, {**kwargs, "attention_mask": masks[window]}

            return hook

        with self._adapter.uncompiled(), composition.going_on(), ExitStack() as hooks:
            for attention, window in zip(stack.attentions, self._windows, strict=True):
                hook = attention.register_forward_pre_hook(masked(window), with_kwargs=True)
                hooks.callback(hook.remove)
            for layer in composition.entries:
                held = prompt.cache.layers[layer.index]
                if layer.linear is None:
                    held.update = prompt.scatter(held)
                    hooks.callback(delattr, held, "update")
                else:
                    mixer = layer.linear.mixer
                    in_parts = prompt.in_parts(layer.linear, mixer.forward)
                    hooks.enter_context(replaced(mixer, "forward", in_parts))
            yield


def windows_of(adapter: ModelAdapter) -> dict[int, Window | None]:
    """The window of each layer of a hybrid model that has K and V, by its index."""
    assert adapter.composition is not None
    stack = adapter.stack

    def window(kind: str) -> Window | None:
        return stack.windows.get("sliding_attention" if "sliding" in kind else kind)

    return {e.index: window(stack.layer_types[e.index]) for e in adapter.composition.with_kv}
