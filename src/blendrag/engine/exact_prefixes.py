"""Exact prefixes in memory: computed once where several waiting prompts begin alike.

Blending a context at ratio r for each of n requests costs n·r prefills of it, and they cannot share the
result, because each question selects other tokens. Computing the common beginning exactly costs one prefill;
then only the questions are left. The KV is kept in a :class:`PrefixTree` for requests that come later.

Models whose KV cannot be moved (layers with a running state, learned positions) go on from such beginnings
in mode prefix, if :class:`~blendrag.model.continuation.Continuation` works for them. A state continues only
the tokens that it was taken after, so states are taken where later prompts are likely to part from this one:
at the end of the system message, of the part before the first chunk, of the prompt, of the answer, and where
this prompt itself parted from an earlier one.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache

from blendrag import tracing
from blendrag.config import Mode
from blendrag.engine.answers import PendingAnswer
from blendrag.engine.kv_namespace import KVNamespace
from blendrag.engine.request import Request
from blendrag.engine.stream import AnswerStream
from blendrag.errors import RequestCancelled, RequestTimeout, UnsupportedModelError
from blendrag.fusor import BlendCache, BlendRequest
from blendrag.fusor.loader import LoadedSpan
from blendrag.fusor.selection import Blending
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.controller import Controller, Prefixes
from blendrag.planning.plan import Plan
from blendrag.serving.block_pool import BlockPool
from blendrag.serving.coroutine import pausing
from blendrag.serving.prefix_tree import PrefixTree
from blendrag.serving.scheduler import Scheduler
from blendrag.store.base import ResidentReader
from blendrag.store.identity import NATIVE_ENCODING
from blendrag.text.matches import common_prefix
from blendrag.text.prompt import SegmentedPrompt

log = logging.getLogger(__name__)

Ids = tuple[int, ...]

#: From so many requests on, the first one may wait longer than for its own blending.
MANY = 5
#: What the requests would compute alone must be so many times the exact prefill.
MARGIN = 1.25
#: Shortest beginning that is computed for several requests, or kept.
MIN_TOKENS = 64

#: Beginnings that are remembered because they could not be computed.
FAILED = 16

#: Modes in which exact KV in memory is used.
MODES = ("blend", "reuse", "prefix")


class SharedPrefix(NamedTuple):
    """The beginning of several prompts, to be computed once."""

    ids: Ids
    others: Sequence[AnswerStream]
    """Streams of the requests that wait for it, without the current one."""


class ExactPrefixes:
    """The exact prefixes of one engine. Used on the scheduler's thread; the caller holds the model's lock."""

    def __init__(self, kv: KVNamespace, scheduler: Scheduler) -> None:
        self._kv = kv
        self._scheduler = scheduler
        self.limit_bytes = kv.settings.batch_bytes // 2
        self.tree: PrefixTree | None = None
        self._weights: Hashable = None
        """Whose KV the tree holds."""
        self.failed: deque[Ids] = deque(maxlen=FAILED)
        """Beginnings that could not be computed, the newest last."""

    @property
    def size_bytes(self) -> int:
        return self.tree.size_bytes if self.tree else 0

    def shrink(self, size_bytes: int) -> int:
        """Drop what no request uses until at most ``size_bytes`` are kept; returns how many are."""
        if self.tree is not None:
            self.tree.shrink(max(0, size_bytes))
        return self.size_bytes

    def close(self) -> None:
        self.tree = None

    def of(self, request: Request) -> Prefixes | None:
        """Opens the prefixes that ``request`` may use, if any. The model was identified just before."""
        if not self.may_use(request):
            return None
        weights = self._kv.model.adapter.identified_weights
        return partial(self._tree_for(weights).join, family_of(request))

    def join(self, request: Request) -> LoadedSpan | None:
        """The beginning that an ordinary ``generate`` of ``request`` goes on from, without a fusion: of a
        prompt without chunks, or for a model whose KV cannot be moved."""
        adapter, ids = self._kv.model.adapter, request.prompt.ids
        going, config = adapter.continuation, adapter.model.generation_config
        if request.sequences > 1 or config.cache_implementation or not self.may_use(request):
            return None
        reader = self._tree_for(adapter.weights_now()).join(family_of(request), ids[:-1])
        if reader is None:
            return None
        if reader.tokens < MIN_TOKENS or not (
            going is None or going.is_worthwhile(reader.tokens, len(ids))
        ):
            reader.close()
            return None
        return LoadedSpan(0, reader.tokens, reader, 0, exact=True)

    def state_ends(self, request: Request, start: int) -> list[int]:
        """After which tokens behind ``start`` a state should be kept while the prompt is computed."""
        adapter, ids, prompt = self._kv.model.adapter, request.prompt.ids, request.prompt
        if self.tree is None or not goes_on(request, adapter):
            return []
        assert adapter.continuation is not None
        # a prompt that is asked again goes on from its last token but one
        ends = {min(self.tree.known(family_of(request), ids), len(ids) - 1)}
        if prompt.chunks:
            ends.add(len(prompt.leading_ids))
        text, tokens = "".join(segment.text for segment in prompt.segments), adapter.tokens
        if request.shared_ends:
            encoded = tokens.encode_prompt(text[: request.shared_ends[-1]], True)
            same = common_prefix(tuple(encoded.ids), ids)
            char_ends = [high for _, high in encoded.offsets[:same]]
            ends |= {bisect_right(char_ends, end) for end in request.shared_ends}
        taken: list[int] = []
        for end in sorted(ends):
            after = taken[-1] if taken else start
            may = end < len(ids) and adapter.continuation.is_worthwhile(end, len(ids))
            if may and end - after >= MIN_TOKENS:
                taken.append(end)
        return taken

    def keep_state(self, request: Request, ids: Ids, cache: Cache) -> None:
        """Keep what ``cache`` holds after exactly these ``ids``, for a model whose KV cannot be moved."""
        adapter, family = self._kv.model.adapter, family_of(request)
        going = adapter.continuation
        if self.tree is None or going is None or len(ids) < MIN_TOKENS:
            return
        if going.length(cache) != len(ids) or self.tree.match(family, ids) == len(ids):
            return
        if not adapter.is_long(len(ids)) and self._weights == adapter.weights_now():
            self.tree.insert(family, ids, going.kv(cache), going.state(cache))

    def known_tokens(self, request: Request) -> int:
        """How many tokens at the beginning of its prompt are in memory, if it may use them."""
        if self.tree is None or request.fixed is not None or request.mode not in MODES:
            return 0
        return self.tree.match(family_of(request), request.prompt.ids)

    def length(self, request: Request, controller: Controller) -> int:
        """How many tokens at the beginning of its prompt are in memory and can be used."""
        if controller.prefixes is None or self.tree is None:
            return 0
        there = self.tree.match(family_of(request), request.prompt.ids)
        return controller.cut(request.prompt, there)

    def share(
        self,
        request: Request,
        controller: Controller,
        calibrated: Callable[[Blending], Blending],
        check: Callable[[], None],
    ) -> tuple[str, ...]:
        """Compute the beginning that waiting prompts have in common with this one, if that saves time.

        ``calibrated`` fills in what was calibrated. Returns a note if it was computed. ``check`` raises if
        this request is over. While others wait for the KV, that happens only once it is computed.
        """
        shared = None
        if controller.prefixes:
            shared = self._worthwhile(request, controller, calibrated)
        if shared is None:
            return ()

        def check_all() -> None:
            if all(stream.done for stream in shared.others):
                check()

        count = len(shared.others) + 1
        try:
            with tracing.span("prefill", lambda: {"blendrag.batch_size": count}):
                kept = self._compute(request, shared.ids, controller, pausing(check_all))
        except (RequestCancelled, RequestTimeout):
            raise
        except Exception as exc:
            self.failed.append(shared.ids)
            log.warning("%d tokens are not shared: %s", len(shared.ids), exc)
            return ()
        check()
        if not kept:
            return ()
        return (
            f"the first {kept} tokens were computed once for {count} requests, because others waited that "
            "begin with them",
        )

    def keep(self, request: Request, plan: Plan, cache: BlendCache, ids: Ids) -> None:
        """Keep of the KV that ``cache`` holds of ``ids``, the prompt or also its answer, what a conversation
        goes on from: all of it without chunks, else the part before the first one.

        In mode prefix with the first chunk, if today's date, or that it is not stored alone, is why it was
        computed.
        """
        if plan.chunks:
            end, first = len(plan.prompt.leading_ids), plan.chunks[0]
            may_lack = self._kv.corpus.is_dated or not self._kv.validity.recipe.is_exact
            if request.mode == "prefix" and first.span is None and may_lack:
                end = max(end, first.segment.end)
            ids = ids[:end]
        if self.tree is None or not self.may_use(request) or len(ids) < MIN_TOKENS:
            return
        adapter, family = self._kv.model.adapter, family_of(request)
        if cache.get_seq_length() < len(ids) or not cache.is_one_sequence:
            return  # it is kept elsewhere by now
        if adapter.is_long(len(ids)) or self.tree.match(family, ids) == len(ids):
            return
        spans = [span for span in plan.spans if span.start < len(ids)]
        if not all(self._is_native or isinstance(span.reader, ResidentReader) for span in spans):
            return
        if plan.spans and plan.chunks and not self._kv.validity.verification().blendable:
            return
        if self._weights == adapter.weights_now():
            self.tree.insert(family, ids, cache.buffers(len(ids)))

    @property
    def _is_native(self) -> bool:
        """Whether stored KV is what was computed, to the bit."""
        return self._kv.corpus.manifest.encoding == NATIVE_ENCODING

    def may_use(self, request: Request) -> bool:
        """Whether ``request`` may go on from KV in memory, and its own be kept there."""
        adapter = self._kv.model.adapter
        if not adapter.fuses:
            return goes_on(request, adapter)
        if request.mode not in MODES or adapter.is_long(len(request.prompt.ids)):
            return False  # the keys of long prompts are rotated otherwise
        return self._is_checked

    @property
    def _is_checked(self) -> bool:
        """Whether attention over our cache was compared with the model's own: layer by layer, or by the
        gate. Moshi's sees a window only in transformers' own cache."""
        kv = self._kv
        with suppress(UnsupportedModelError):
            return kv.model.fusor.packs or kv.validity.verification().blendable
        return False

    def _worthwhile(
        self, request: Request, controller: Controller, calibrated: Callable[[Blending], Blending]
    ) -> SharedPrefix | None:
        """The beginning whose single prefill saves most over what the waiting requests would compute."""
        prompt, family = request.prompt, family_of(request)
        waiting = (
            each
            for each in self._scheduler.waiting
            if isinstance(each, PendingAnswer) and each.prefixes is self
        )
        alike = [
            (other, stream, controller.cut(prompt, common_prefix(prompt.ids, other.prompt.ids)))
            for other, stream in ((each.request, each.stream) for each in waiting)
            if other.prompt is not prompt
            and self.may_use(other)
            and other.prompt.chunks
            and family_of(other) == family
            and not stream.done
        ]
        best, most = None, 0.0
        start = self.length(request, controller)
        most_tokens = self.limit_bytes // self._kv.model.adapter.layout.token_bytes
        for end in sorted({min(end, len(prompt.ids) - 1) for _, _, end in alike}):
            if end - start < MIN_TOKENS or end > most_tokens or prompt.ids[:end] in self.failed:
                continue

            others = [(other, stream) for other, stream, shared in alike if shared >= end]
            ways = Counter(map(_way, [request, *(other for other, _ in others)]))
            cost = {
                way: _cost(controller, prompt, way.mode, calibrated(way.blending), start, end)
                for way in (*ways, _EXACT)
            }
            alone = cost[_way(request)]
            gain = sum(cost[way] * times for way, times in ways.items()) - MARGIN * cost[_EXACT]
            if gain > most and (len(others) + 1 >= MANY or alone >= cost[_EXACT]):
                best, most = SharedPrefix(prompt.ids[:end], [stream for _, stream in others]), gain
        return best

    def _compute(
        self, request: Request, ids: Ids, controller: Controller, check: Callable[[], None]
    ) -> int:
        """Prefill ``ids`` and keep their KV; returns how many of them are in memory now."""
        kv, namespace = self._kv, controller.namespace
        if not kv.validity.verification().blendable:
            return 0
        with closing(controller.plan(request.prompt, *_EXACT)) as plan:
            spans = tuple(
                span
                for span in plan.spans
                if span.end <= len(ids)
                and (self._is_native or isinstance(span.reader, ResidentReader))
            )
            blend = BlendRequest(len(ids), spans, _EXACT.blending)
            given = torch.tensor([ids], device=kv.model.adapter.device)
            _, cache, _ = kv.model.fusor.prefill(given, blend, check=check)
        if kv.validity.namespace != namespace:
            return 0  # the weights changed meanwhile
        tree = self._tree_for(kv.model.adapter.identified_weights)
        return tree.insert(family_of(request), ids, cache.buffers(len(ids)))

    def _tree_for(self, weights: Hashable) -> PrefixTree:
        """The tree of the loaded model; a new one once its ``weights`` or adapters have changed."""
        adapter = self._kv.model.adapter
        going = adapter.continuation
        if self.tree is None or self._weights != weights:
            layout = adapter.layout if going is None else going.layout
            pool = BlockPool(layout, self.limit_bytes, adapter.device)
            self.tree = PrefixTree(pool, has_states=going is not None)
            self._weights = weights
            self.failed.clear()
        return self.tree


def goes_on(request: Request, adapter: ModelAdapter) -> bool:
    """Whether the request may go on from a state: stock ``generate`` over a cache that it is given."""
    going, composes = adapter.continuation, adapter.composition is not None
    is_alone = composes and request.mode in MODES and not request.prompt.chunks
    if going is None or not (is_alone or request.mode == "prefix"):
        return False
    own = adapter.model.generation_config.cache_implementation is None
    # the keys of long prompts are rotated otherwise
    is_alike = going.dtype == adapter.model.dtype and not adapter.is_long(len(request.prompt.ids))
    return own and request.sequences == 1 and is_alike


class _Way(NamedTuple):
    """How a request computes its prompt."""

    mode: Mode
    blending: Blending


_EXACT = _Way("prefix", Blending.of("full"))


def _way(request: Request) -> _Way:
    return _Way(request.mode, request.blending)


def family_of(request: Request) -> Hashable:
    """Requests of different families share nothing."""
    return request.options.tenant, request.options.cache_salt


def _cost(
    controller: Controller,
    prompt: SegmentedPrompt,
    mode: Mode,
    blending: Blending,
    start: int,
    end: int,
) -> float:
    """What the tokens ``[start, end)`` cost: seconds with a machine profile, else rows."""
    rows = controller.rows(prompt, mode, blending, start, end)
    profile = controller.profile
    if profile is None or not rows:
        return rows
    return profile.layers * profile.layer(rows, (start + end) / 2)
