"""The two roads from a request to the KV of its prompt. All before and after is the same for both.

:class:`BlendedRoad`: chunks at the positions of the prompt, of which tokens are recomputed (CacheBlend).
:class:`FixedPositionsRoad`: modules at the positions of their schema, loaded as they are (Prompt Cache).

A road serves one request, on the scheduler's thread, under the model's lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from blendrag.engine.batched_prefill import NOTHING_AHEAD, Ahead
from blendrag.engine.exact_prefixes import goes_on
from blendrag.engine.lazy_model import LazyModel
from blendrag.engine.planner import Planner, checked
from blendrag.engine.request import Request
from blendrag.engine.schemas import Schemas
from blendrag.engine.stream import AnswerStream
from blendrag.fusor import BlendCache, Fusion
from blendrag.fusor.composer import composed_in_order
from blendrag.metrics import Timeline
from blendrag.model.sharing import before_layers
from blendrag.planning.plan import Plan, Reason
from blendrag.schema.concatenation import ConcatenatedPrompt, FixedPrompt, ModuleCache
from blendrag.serving.coroutine import note_loaded, pausing
from blendrag.serving.kv_budget import first_room
from blendrag.serving.prefix_tree import PrefixReader

STILL_CORRUPT = Reason("stored KV failed verification again and again")


class Prefill(NamedTuple):
    """What ``model.generate`` is given, whose first forward computes the rest of the prompt."""

    ids: torch.Tensor
    """``[1, N]``"""
    cache: Any = None
    """``None``: the model makes its own."""
    fusion: Fusion | None = None
    batch_size: int = 1
    """Prompts in the forward that computed it."""
    keep: Callable[[tuple[int, ...]], None] | None = None
    """Called with the ids whose KV is in ``cache``: of the prompt, at the end also of the answer."""
    unhook: Callable[[], None] | None = None
    """Ends what precedes each layer, once a scheduler's step decodes the tokens."""
    load_s: float = 0.0
    """Seconds spent reading and verifying stored chunks, if there is no fusion."""
    recomputed: tuple[int, ...] = ()
    """Tokens that every layer recomputed of each loaded span that is not exact, if there is no fusion."""


class Road(ABC):
    """From one request to the KV of its prompt."""

    def __init__(self, model: LazyModel, request: Request, stream: AnswerStream) -> None:
        self.adapter = model.adapter
        self.request = request
        self.ahead = NOTHING_AHEAD
        """What was done before the request's turn."""
        self._model = model
        self._stream = stream
        self._check = pausing(stream.check)
        self.prefilled: Callable[[Plan, BlendCache], None] | None = None
        """Called once with the KV of the prompt, if it is in a cache of ours."""

    @abstractmethod
    def open(self) -> float:
        """Check once for all requests that stored KV is the model's; returns the seconds."""

    def begin(self, ahead: Ahead, opening_s: float) -> None:
        """The request's turn has come, after ``opening_s`` that do not count. Cuts its answer to the context.

        Raises :class:`ContextOverflowError`, :class:`InvalidInputError`, :class:`UnsupportedModelError`.
        """
        request = checked(self.request, self.adapter, self._limit_tokens)
        self.request = replace(request, asked_at=request.asked_at + opening_s)
        self.ahead = ahead

    @property
    @abstractmethod
    def _limit_tokens(self) -> int:
        """Positions that the prompt and its answer may take."""

    @property
    @abstractmethod
    def mode(self) -> str:
        """Its name in the metrics."""

    @abstractmethod
    def plan(self, avoid: Collection[str], loads: bool) -> Plan:
        """What is loaded; close it. ``avoid``: keys that failed verification. ``loads=False``: nothing is."""

    @abstractmethod
    def prefill(self, plan: Plan, timeline: Timeline | None) -> AbstractContextManager[Prefill]:
        """Within this context, the model's first forward loads and computes by ``plan``.

        Raises :class:`SpanCorruptError` if bytes fail verification, then or in the forward.
        """

    @abstractmethod
    def finish(self, plan: Plan) -> None:
        """After the answer: prepare in the background what later requests may need."""

    @property
    def decodes_jointly(self) -> bool:
        """Whether tokens may be decoded together with those of other requests."""
        return self._model.decodes_jointly

    @property
    def _room(self) -> int:
        return first_room(self.request.max_new_tokens)

    def _ids(self, ids: Collection[int]) -> torch.Tensor:
        return torch.tensor([ids], device=self.adapter.device)


class BlendedRoad(Road):
    """Chunks are loaded to the positions of the prompt, and the policy's tokens recomputed."""

    def __init__(
        self, model: LazyModel, planner: Planner, request: Request, stream: AnswerStream
    ) -> None:
        super().__init__(model, request, stream)
        self._planner = planner

    def open(self) -> float:
        uses_chunks = self.request.mode != "full" and self.request.prompt.chunks
        return self._planner.open() if uses_chunks else 0.0

    @property
    def _limit_tokens(self) -> int:
        return self.adapter.context_tokens

    @property
    def mode(self) -> str:
        return self.request.mode

    def plan(self, avoid: Collection[str], loads: bool) -> Plan:
        if not loads:
            return Plan.computed(self.request.prompt, STILL_CORRUPT)
        is_first = not avoid and self.ahead.plan is None
        return self._planner.plan(self.request, self._stream, frozenset(avoid), is_first)

    @contextmanager
    def prefill(self, plan: Plan, timeline: Timeline | None) -> Iterator[Prefill]:
        adapter, check = self.adapter, self._check
        ids = self._ids(self.request.prompt.ids)
        tokens, kept = ids.shape[1], partial(self._keep, plan)
        cache: BlendCache | None
        prefilled = self.ahead.prefilled if plan is self.ahead.plan else None
        with adapter.own_tables():
            if prefilled is not None:  # the first forward has already run, in a batch
                note_loaded(prefilled.fusion)
                with prefilled.replayed(adapter.stack.base) as cache:
                    size = self.ahead.batch_size
                    yield Prefill(ids, cache, prefilled.fusion, size, partial(kept, cache))
            elif goes_on(self.request, adapter):
                with before_layers(adapter.decoder_layers, check) as unhook:
                    yield self._continued(ids, plan)._replace(unhook=unhook)
            elif adapter.composition is not None and plan.spans:
                with (
                    before_layers(adapter.decoder_layers, check) as unhook,
                    self._composed(ids, plan) as made,
                ):
                    yield made._replace(unhook=unhook)
            elif not (plan.spans and plan.chunks):  # can still be abandoned before each layer
                cache = self._cache_behind(plan)
                keep = None if cache is None else partial(kept, cache)
                with before_layers(adapter.decoder_layers, check) as unhook:
                    yield Prefill(ids, cache, keep=keep, unhook=unhook)
            elif self.request.sequences == 1:  # the first forward is the fusion
                fusor, blend = self._model.fusor, plan.request(tokens)
                cache = fusor.new_cache(tokens, self._room)
                with fusor.fuse(cache, blend, check, timeline, last_row_only=True) as fusion:
                    note_loaded(fusion)
                    yield Prefill(ids, cache, fusion, keep=partial(kept, cache))
            else:  # all but the last token, whose KV is repeated for each sequence
                before = ids[:, : tokens - 1]
                _, cache, fusion = self._model.fusor.prefill(
                    before, plan.request(tokens - 1), check=check, timeline=timeline
                )
                cache.batch_repeat_interleave(self.request.sequences)
                yield Prefill(ids, cache, fusion)

    def _keep(self, plan: Plan, cache: BlendCache, ids: tuple[int, ...]) -> None:
        self._planner.prefixes.keep(self.request, plan, cache, ids)
        if self.prefilled is not None:
            self.prefilled(plan, cache)
            self.prefilled = None

    def _cache_behind(self, plan: Plan) -> BlendCache | None:
        """A cache for ``generate`` with the beginning that was joined; ``None``: transformers makes one."""
        request, adapter, span = self.request, self.adapter, plan.leading_span
        is_own = adapter.model.generation_config.cache_implementation is not None
        if not adapter.fuses or request.sequences > 1 or is_own:
            return None
        if not (self.decodes_jointly or self._planner.prefixes.may_use(request)):
            return None
        cache = BlendCache(adapter.layout, len(request.prompt.ids) + self._room + 1, adapter.device)
        if span is not None:
            for layer, buffer in enumerate(cache.buffers(span.end)):
                span.reader.read_layer(layer, buffer)
            cache.show(span.end)
        return cache

    @contextmanager
    def _composed(self, ids: torch.Tensor, plan: Plan) -> Iterator[Prefill]:
        """Over stored chunks whose running states are composed."""
        composer = self._model.composer
        if composer.serves:
            ratio = plan.blending.fixed_ratio
            prompt = composer.prefill(ids, plan.spans, ratio, plan.chunks_end)
            with prompt.replayed(self.adapter.stack.base) as cache:
                yield Prefill(ids, cache, load_s=prompt.load_s, recomputed=prompt.recomputed)
        else:
            composition = self.adapter.composition
            assert composition is not None
            cache, _, load_s = composed_in_order(composition, ids, plan.spans, self._check)
            yield Prefill(ids, cache, load_s=load_s)

    def _continued(self, ids: torch.Tensor, plan: Plan) -> Prefill:
        """Behind a beginning, for a model whose KV cannot be moved. Keeps states on the way."""
        going, prefixes = self.adapter.continuation, self._planner.prefixes
        assert going is not None
        prompt, span = self.request.prompt.ids, plan.leading_span
        cache, at = going.new_cache(), 0
        if span is not None:
            assert isinstance(span.reader, PrefixReader)
            assert span.reader.state is not None
            cache, at = going.restore(span.reader.state, span.reader), span.end

        def keep(kept: tuple[int, ...]) -> None:
            prefixes.keep_state(self.request, kept, cache)

        for end in prefixes.state_ends(self.request, at):
            going.forward(ids[:, at:end], cache, at)
            keep(prompt[:end])
            at = end
        if going.in_steps and 0 < at < len(prompt) - 1:
            going.forward(ids[:, at:-1], cache, at)
        return Prefill(ids, cache, keep=keep)

    def finish(self, plan: Plan) -> None:
        self._planner.background.note(plan, self.request.options)


class FixedPositionsRoad(Road):
    """Modules of a schema are loaded to the schema's positions; nothing of them is recomputed."""

    mode = "schema"

    def __init__(
        self,
        model: LazyModel,
        schemas: Schemas,
        request: Request,
        fixed: FixedPrompt,
        stream: AnswerStream,
    ) -> None:
        super().__init__(model, request, stream)
        self._schemas = schemas
        self._fixed = fixed
        self._prompt: ConcatenatedPrompt | None = None

    def open(self) -> float:
        return self._schemas.open()

    @property
    def _limit_tokens(self) -> int:
        return self._schemas.model.limit

    def plan(self, avoid: Collection[str], loads: bool) -> Plan:
        prompt, stream = self.request.prompt, self._stream
        plan, self._prompt = self._schemas.plan(self._fixed, prompt, stream, avoid, loads)
        return plan

    @contextmanager
    def prefill(self, plan: Plan, timeline: Timeline | None) -> Iterator[Prefill]:
        model, prompt = self._schemas.model, self._prompt
        assert prompt is not None
        cache = ModuleCache(model.layout, prompt, self._room, self.adapter.device)
        try:
            cache.start_loading()
            note_loaded(prompt)
            with (
                model.uncompiled(),
                model.placed(cache, prompt.positions),
                before_layers(model.decoder.layers, self._check) as unhook,
            ):
                if self.request.sequences > 1:
                    cache.load()
                    cache.batch_repeat_interleave(self.request.sequences)
                yield Prefill(self._ids(prompt.ids), cache, unhook=unhook)
        finally:
            cache.close()

    def finish(self, plan: Plan) -> None:
        self._schemas.prefetch_siblings(self._fixed)
