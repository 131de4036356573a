"""The loading controller: what of one prompt is loaded, at which recompute ratio, and why (CacheBlend §5.1).

With a machine profile times are predicted. With ratio ``auto`` they decide what is loaded and the ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

from blendrag.config import Mode
from blendrag.fusor.loader import LoadedSpan
from blendrag.fusor.selection import Blending
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.choice import Choice, choose
from blendrag.planning.estimate import Estimator, Forecast, LoadEstimate, PromptParts, StoredPart
from blendrag.planning.plan import IN_MEMORY, MODE_FULL, MissingKV, Plan, PlannedChunk, Reason
from blendrag.planning.profile import COLD, DISK, Profile
from blendrag.store.base import KVReader, ResidentReader, WantedKV
from blendrag.store.durable import readable_size
from blendrag.store.encodings import stored_bytes_by_layer
from blendrag.store.identity import (
    NATIVE_ENCODING,
    beginning_key,
    chunk_key,
    exact_key,
    kv_namespace,
)
from blendrag.store.kv import KVLayout
from blendrag.store.remote.tier import RemoteReader, expected_load_s, request_ahead
from blendrag.store.tiered import KVStore
from blendrag.text.prompt import Segment, SegmentedPrompt

#: Longest part before the first chunk that is stored as an exact prefix, in tokens.
LEADING_MAX_TOKENS = 4096

#: Share of a full prefill that a prompt waits for the first bytes from the remote, and the shortest wait.
#: Where loading is faster than computing, the first layers take less.
REMOTE_WAIT_SHARE = 0.05
MIN_REMOTE_WAIT_S = 0.02
#: Loading from the remote and blending must take at most this share of computing.
MAX_REMOTE_SHARE = 0.9
#: The remote may take this many times as long as its first bytes promise.
REMOTE_SLOWDOWN_ALLOWED = 2.0

NO_KV = Reason("no KV stored for this model and prefix; encoded after the answer", is_missing=True)
CORRUPT = Reason("stored KV failed verification and was set aside; computed")
NOT_ASKED = Reason("no KV stored here, and the remote is not asked at the moment", is_missing=True)
NOT_LEADING = Reason("mode prefix reuses a chunk only directly after the corpus's prefix")
NOT_ALONE = "as the first chunk of prompts it is not stored yet"
PROMPT_END = Reason("the prompt ends in the chunk, and its last tokens are always computed")
NOT_WHOLE = Reason("a part of a chunk, whose running states are stored only for all of it")
EXACT_PREFIX = Reason("exact prefix match")

#: Opens what is in memory of the longest exact prefix of these ids.
Prefixes = Callable[[tuple[int, ...]], ResidentReader | None]
#: Encodes chunks and returns how many of them are stored then.
Encode = Callable[[Sequence[MissingKV]], int]


@dataclass(frozen=True)
class Controller:
    """Plans prompts for one model over what is stored under one namespace, after one corpus prefix.

    :meth:`rows` asks the store once for each chunk, so take a new one for each request.
    """

    adapter: ModelAdapter
    store: KVStore
    namespace: str
    prefix_ids: tuple[int, ...]
    prefix_min_tokens: int
    """Shortest part before the first chunk that is looked up as an exact prefix."""
    encoding: str = NATIVE_ENCODING
    """How KV is stored under ``namespace``."""
    profile: Profile | None = None
    """What this machine needs for loading and computing, if that was measured."""
    prefixes: Prefixes | None = None
    """Exact prefixes that are in memory."""
    token_s: Callable[[], float] | None = None
    """Seconds to compute a token, about; may measure it. ``None``: whatever the remote holds is loaded."""
    scope: str | None = None
    """Whose prompts share the part before the first chunk; ``None``: it is neither stored nor read."""
    is_long: bool = False
    """Whether prompts have LongRoPE's table for long ones, and KV of it is loaded."""
    kept: Callable[[Segment], WantedKV | None] | None = None
    """What earlier prompts of the scope left of a chunk without KV, maybe less its last tokens."""
    undated_ids: tuple[int, ...] = ()
    """Beginning of ``prefix_ids`` that is stored by itself, because the rest changes from day to day."""
    chunks_are_exact: bool = True
    """Whether all chunks are encoded by the model alone; otherwise only the first of a prompt is."""
    _stored: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Whether the store had a key when it was asked."""

    def plan(
        self,
        prompt: SegmentedPrompt,
        mode: Mode,
        blending: Blending,
        avoid: frozenset[str] = frozenset(),
        reserve: int = 1,
        encode: Encode | None = None,
    ) -> Plan:
        """Open what ``mode`` may load, predict its time, and choose what is worth loading.

        ``avoid``: keys that failed verification already; they are computed. The prompt's last ``reserve``
        tokens are always computed, as their logits are needed. ``encode`` is given the whole chunks that no
        tier has, each once; what it stores is loaded, too. The caller closes the plan.
        """
        if mode == "full":
            return Plan.computed(prompt, MODE_FULL)
        last = len(prompt.ids) - reserve
        plan = Plan(prompt, (), blending.at(blending.fixed_ratio))
        readers: dict[int, KVReader] = {}
        try:
            span, leading = self._leading(prompt, avoid, last)
            plan = replace(plan, leading_span=span, leading=leading)
            span = self._in_memory(prompt, span, last) or span
            plan = replace(plan, leading_span=span)
            wanted = self._wanted(prompt, mode, avoid, last, span.end if span else 0)
            readers = self._open_all(prompt, wanted)
            if mode != "prefix":  # none of these is exact
                for other in (self._by_recipe, self._left):
                    instead = self._instead(prompt, avoid, wanted, readers, other)
                    readers |= self._open_all(prompt, instead)
            if encode is not None:
                stored = self._encoded(prompt, wanted.keys() - readers.keys(), encode)
                readers |= self._open_all(prompt, {at: wanted[at] for at in stored})
            if span is None and self._begins_undated(prompt) and 0 in readers:
                end = min(len(self.undated_ids), last)
                span = LoadedSpan(0, end, readers[0], 0, exact=True)
            chunks = []
            for segment in prompt.chunks:
                if span is not None and segment.position < span.end:
                    chunks.append(PlannedChunk(segment, IN_MEMORY))
                else:
                    reader = readers.get(segment.position)
                    chunks.append(self._chunk(segment, prompt, mode, avoid, last, reader))
            is_short = any(chunk.reason == NOT_ASKED for chunk in chunks)
            notes = (self.store.trouble,) if is_short else ()
            plan = replace(plan, chunks=tuple(chunks), leading_span=span, notes=notes)
            plan = self._without_slow_remote(plan)
            return self._estimated(plan, mode, blending) if self.profile and chunks else plan
        except BaseException:
            plan.close()
            for reader in readers.values():
                reader.close()
            raise

    def _encoded(self, prompt: SegmentedPrompt, absent: Set[int], encode: Encode) -> list[int]:
        """Let the whole chunks at ``absent`` positions be encoded; where they are, if any is stored now."""
        whole = {s.position: s for s in prompt.chunks if s.complete and s.position in absent}
        missing = tuple(dict.fromkeys(map(MissingKV.of, whole.values())))
        return [*whole] if missing and encode(missing) else []

    def rows(
        self, prompt: SegmentedPrompt, mode: Mode, blending: Blending, start: int, end: int
    ) -> float:
        """Rows per layer that a request computes for its tokens ``[start, end)`` by what is stored."""
        fresh, blended, chunks = end - start, 0, 0
        stored_keys = self._stored_keys(prompt)
        for segment in prompt.chunks:
            tokens = min(segment.end, end) - max(segment.position, start)
            exact = self._is_exact(segment, prompt)
            if tokens <= 0 or not (exact or mode != "prefix"):
                continue
            if self._place(segment, prompt)[1] in stored_keys:
                fresh -= tokens
                blended += tokens * (not exact)
                chunks += not exact
        if not blended:
            return float(fresh)
        layers = len(self.adapter.layout.layers)
        counts = blending.layer_counts(blended, layers, chunks)
        return fresh + sum(counts) / max(1, len(counts))

    def cut(self, prompt: SegmentedPrompt, end: int) -> int:
        """``end``, or where the chunk begins that ends later: chunks are loaded from their beginning on."""
        last = len(prompt.ids) - 1
        split = (s.position for s in prompt.chunks if s.position < end < min(s.end, last))
        return next(split, end)

    def _stored_keys(self, prompt: SegmentedPrompt) -> set[str]:
        """Keys of its chunks that the store has."""
        places = {self._place(segment, prompt) for segment in prompt.chunks}
        for namespace in {namespace for namespace, _ in places}:
            keys = {key for within, key in places if within == namespace}
            if new := keys - self._stored.keys():
                found = self.store.where(namespace, new)
                self._stored.update((key, key in found) for key in new)
        return {key for _, key in places if self._stored[key]}

    def _is_exact(self, segment: Segment, prompt: SegmentedPrompt) -> bool:
        """Whether the chunk directly follows the prefix that it was encoded with, and nothing else."""
        at = segment.position
        return (
            not segment.first and at == len(self.prefix_ids) and prompt.ids[:at] == self.prefix_ids
        )

    def _place(self, segment: Segment, prompt: SegmentedPrompt) -> tuple[str, str]:
        """Namespace and key of the KV that fits a chunk's place best: that of the model alone for the first
        chunk, which no other precedes, and where that is exact."""
        if segment.position == prompt.chunks[0].position or self._is_exact(segment, prompt):
            namespace, ids = self._within(segment.scope), segment.stored_ids
            return namespace, exact_key(namespace, self.prefix_ids, ids, self.chunks_are_exact)
        return self._place_by_recipe(segment)

    def _place_by_recipe(self, segment: Segment) -> tuple[str, str]:
        """Namespace and key of the KV by which a chunk is stored for all places."""
        namespace = self._within(segment.scope)
        return namespace, chunk_key(namespace, self.prefix_ids, segment.stored_ids)

    def _within(self, scope: str | None) -> str:
        return kv_namespace(self.namespace, scope, self.is_long)

    # -- open what is stored --------------------------------------------------------------------------

    def _leading(
        self, prompt: SegmentedPrompt, avoid: frozenset[str], last: int
    ) -> tuple[LoadedSpan | None, tuple[int, ...]]:
        """The part before the first chunk as an exact prefix: its span, or the ids worth storing."""
        ids = prompt.leading_ids
        fits = max(1, self.prefix_min_tokens) <= len(ids) <= LEADING_MAX_TOKENS
        is_cut = self.adapter.layout.has_states and len(ids) > last
        if self.scope is None or is_cut or not (prompt.chunks and fits and last):
            return None, ()
        namespace = self._within(self.scope)
        key = beginning_key(namespace, ids, self.chunks_are_exact)
        layout = self.adapter.layout.encoded(self.encoding)
        reader = None if key in avoid else self.store.open(namespace, key, layout, len(ids))
        if reader is None:
            return None, ids
        return LoadedSpan(0, min(len(ids), last), reader, 0, exact=True), ()

    def _in_memory(
        self, prompt: SegmentedPrompt, stored: LoadedSpan | None, last: int
    ) -> LoadedSpan | None:
        """The longest exact prefix in memory, if it is longer than the stored one, which is closed then."""
        if self.prefixes is None or not prompt.chunks:
            return None
        reader = self.prefixes(prompt.ids[:last])
        if reader is None:
            return None
        end = min(self.cut(prompt, reader.tokens), last)
        if end < max(self.prefix_min_tokens, stored.end + 1 if stored else 0):
            reader.close()
            return None
        if stored is not None:
            stored.reader.close()
        return LoadedSpan(0, end, reader, 0, exact=True)

    def _begins_undated(self, prompt: SegmentedPrompt) -> bool:
        """Whether the prompt begins with what precedes today's date in the prefix, an exact prefix."""
        ids = self.undated_ids
        is_cut = self.adapter.layout.has_states and len(ids) >= len(prompt.ids)
        return bool(ids and not is_cut and prompt.chunks and prompt.leading_ids[: len(ids)] == ids)

    def _wanted(
        self, prompt: SegmentedPrompt, mode: Mode, avoid: frozenset[str], last: int, start: int
    ) -> dict[int, WantedKV]:
        """What may be loaded from token ``start`` on, by position: chunks, at 0 the part before the date."""
        wanted: dict[int, WantedKV] = {}
        if not start and self._begins_undated(prompt):
            namespace, ids = self._within(None), self.undated_ids
            key = beginning_key(namespace, ids, self.chunks_are_exact)
            wanted[0] = WantedKV(namespace, key, len(ids))
        for segment in prompt.chunks:
            if segment.position >= start and not self._why_not(segment, prompt, mode, last):
                wanted[segment.position] = WantedKV(
                    *self._place(segment, prompt), len(segment.stored_ids)
                )
        return {at: each for at, each in wanted.items() if last and each.key not in avoid}

    def _instead(
        self,
        prompt: SegmentedPrompt,
        avoid: frozenset[str],
        wanted: Mapping[int, WantedKV],
        found: Mapping[int, KVReader],
        other: Callable[[Segment], WantedKV | None],
    ) -> dict[int, WantedKV]:
        """The ``other`` KV of chunks whose ``wanted`` KV was not ``found``."""
        left = (s for s in prompt.chunks if s.position in wanted and s.position not in found)
        asked = ((s.position, other(s)) for s in left)
        return {
            at: each
            for at, each in asked
            if each is not None and each.key not in (*avoid, wanted[at].key)
        }

    def _by_recipe(self, segment: Segment) -> WantedKV | None:
        """KV of the recipe, where there is other KV of the model alone."""
        if self.chunks_are_exact:
            return None
        return WantedKV(*self._place_by_recipe(segment), len(segment.stored_ids))

    def _left(self, segment: Segment) -> WantedKV | None:
        """What earlier prefills may have left of a chunk."""
        return None if self.kept is None or self.is_long else self.kept(segment)

    def _open_all(
        self, prompt: SegmentedPrompt, wanted: Mapping[int, WantedKV]
    ) -> dict[int, KVReader]:
        """Those of ``wanted`` that are stored."""
        if not wanted:
            return {}
        first_s = partial(self._first_s, prompt) if self.token_s is not None else None
        layout = self.adapter.layout.encoded(self.encoding)
        readers = self.store.open_all([*wanted.values()], layout, first_s)
        found = zip(wanted, readers, strict=True)
        return {at: reader for at, reader in found if reader is not None}

    def _why_not(
        self, segment: Segment, prompt: SegmentedPrompt, mode: Mode, last: int
    ) -> Reason | None:
        """Why a chunk may not be loaded, wherever its KV is; ``None`` if it may."""
        if mode == "prefix" and not self._is_exact(segment, prompt):
            return NOT_LEADING
        if min(segment.end, last) <= segment.position:
            return PROMPT_END
        is_whole = segment.complete and not segment.first and segment.end <= last
        return NOT_WHOLE if self.adapter.layout.has_states and not is_whole else None

    def _chunk(
        self,
        segment: Segment,
        prompt: SegmentedPrompt,
        mode: Mode,
        avoid: frozenset[str],
        last: int,
        reader: KVReader | None,
    ) -> PlannedChunk:
        if why := self._why_not(segment, prompt, mode, last):
            return PlannedChunk(segment, why)
        if reader is None:
            if self.store.trouble:
                return PlannedChunk(segment, NOT_ASKED)
            is_corrupt = self._place(segment, prompt)[1] in avoid
            return PlannedChunk(segment, CORRUPT if is_corrupt else NO_KV)
        is_best = reader.key == self._place(segment, prompt)[1]
        held = segment.position + reader.tokens - segment.first
        end, exact = min(segment.end, last, held), is_best and self._is_exact(segment, prompt)
        stored_position = len(self.prefix_ids) + segment.first
        span = LoadedSpan(segment.position, end, reader, stored_position, exact, segment.first)
        is_kept = not is_best and reader.key != self._place_by_recipe(segment)[1]
        why = _why_loaded(segment, span, not is_kept)
        if not (is_best or is_kept):
            why = Reason(f"{why.text}; {NOT_ALONE}", is_missing=True)
        return PlannedChunk(segment, why, span)

    def _without_slow_remote(self, plan: Plan) -> Plan:
        """``plan`` without what is read from the remote, unless that saves time, going by the first bytes."""
        spans = [span for span in plan.spans if isinstance(span.reader, RemoteReader)]
        if self.token_s is None or not spans:
            return plan
        readers = [span.reader for span in spans if isinstance(span.reader, RemoteReader)]
        token_s = self._token_s(len(plan.prompt.ids))
        computing_s = token_s * sum(span.tokens for span in spans)
        recomputing_s = (
            plan.blending.fixed_ratio * token_s * sum(s.tokens for s in spans if not s.exact)
        )
        loading_s = expected_load_s(readers)
        share = self._scouted_share(plan)
        if blended_s(loading_s, recomputing_s, share) <= MAX_REMOTE_SHARE * computing_s:
            readers[0].allow(REMOTE_SLOWDOWN_ALLOWED * loading_s)
            request_ahead(readers)
            return plan
        note = (
            f"the remote is slower than computing here, so {len(spans)} of {len(plan.spans)} stored parts "
            f"were not read: computing them takes about {computing_s:.1f} s"
        )
        why = Reason("computing it is faster here than reading it from the remote")
        for reader in readers:
            reader.is_wanted = True  # in the background, for the next prompt
        plan = plan.without(dict.fromkeys((span.start for span in spans), why))
        return replace(plan, notes=(*plan.notes, note))

    def _token_s(self, tokens: int) -> float:
        """Seconds to compute one of so many tokens."""
        assert self.token_s is not None
        return self.profile.prefill_s(tokens) / tokens if self.profile else self.token_s()

    def _first_s(self, prompt: SegmentedPrompt) -> float:
        """Seconds that the prompt waits for the first bytes from the remote."""
        tokens = len(prompt.ids)
        return max(MIN_REMOTE_WAIT_S, REMOTE_WAIT_SHARE * tokens * self._token_s(tokens))

    def _scouted_share(self, plan: Plan) -> float:
        """Share of the layers that are loaded before anything is recomputed."""
        if all(span.exact for span in plan.spans):
            return 0.0
        layers = len(self.adapter.layout.layers)
        return plan.blending.policy.attention_layers(layers).stop / layers

    # -- predict and choose ---------------------------------------------------------------------------

    def _estimated(self, plan: Plan, mode: Mode, blending: Blending) -> Plan:
        """With predicted times; for an automatic ratio, with the loads and the ratio that are fastest."""
        assert self.profile is not None
        stored = self.adapter.layout.encoded(self.encoding)
        prompt = PromptParts(
            len(plan.prompt.ids),
            tuple(_part(span, stored) for span in plan.spans),
            blending.policy.needs_deviation,
            blending.policy.attention_layers(len(stored.layers)).stop,
            blending.policy.moves_others,
        )
        try:
            estimator = Estimator(self.profile, prompt)
        except KeyError as tier:
            note = (
                f"the machine profile has no times for reading from {tier.args[0]}, so ratio auto is the "
                "smallest one; measure with blendrag profile"
            )
            return replace(plan, notes=plan.notes + (note,) * blending.is_auto)
        forecast_at = partial(_forecast, blending)
        if not (blending.is_auto and mode == "blend"):
            forecast = forecast_at(estimator.loading(), blending.fixed_ratio)
            return replace(plan, forecast=forecast)
        choice = choose(estimator, forecast_at, blending.fixed_ratio, blending.policy.budgeted)
        slow = {
            span.start: _why_computed(part, choice.waits)
            for i, (span, part) in enumerate(zip(plan.spans, prompt.parts, strict=True))
            if not (i in choice.loaded or isinstance(span.reader, ResidentReader))
        }
        decision, notes = _explained(choice, len(prompt.parts), len(slow))
        return replace(
            plan.without(slow),
            blending=blending.at(choice.ratio),
            forecast=choice.forecast,
            decision=decision,
            notes=plan.notes + notes,
        )


def _forecast(blending: Blending, estimate: LoadEstimate, ratio: float) -> Forecast:
    """With what the policy recomputes at ``ratio``."""
    counts = blending.at(ratio).layer_counts(estimate.candidates, estimate.layers, estimate.chunks)
    return estimate.at(counts)


def blended_s(loading_s: float, recomputing_s: float, scouted_share: float) -> float:
    """Seconds to load and blend: loads for a scout pass come first, others overlap with recomputing."""
    scouted_s = scouted_share * loading_s
    return scouted_s + max(loading_s - scouted_s, recomputing_s)


def _why_loaded(segment: Segment, span: LoadedSpan, is_own: bool) -> Reason:
    if span.exact:
        return EXACT_PREFIX
    moved = f"moved by {span.offset} positions"
    if not is_own:
        moved = f"as an earlier prompt computed it, {moved}"
    if segment.complete:
        return Reason(moved)
    of = len(segment.stored_ids)
    if segment.first:
        last = segment.first + len(segment.ids)
        return Reason(f"a part: tokens {segment.first + 1} to {last} of {of}, {moved}")
    return Reason(f"tail cut off: {len(segment.ids)} of {of} tokens, {moved}")


def _part(span: LoadedSpan, stored: KVLayout) -> StoredPart:
    reader = span.reader
    sizes = stored_bytes_by_layer(stored, reader.tokens)
    tier = COLD if reader.tier == DISK and not reader.is_cached() else reader.tier
    return StoredPart(span.start, span.end, tier, sizes, span.exact)


def _why_computed(part: StoredPart, waits: bool) -> Reason:
    than = "blending it, however fast it is read"
    if waits:
        than = f"waiting for its {readable_size(sum(part.layer_bytes))} from {part.tier}"
    return Reason(f"computing it is faster here than {than}")


def _explained(choice: Choice, parts: int, given_up: int) -> tuple[str, tuple[str, ...]]:
    """The decision in words, and notes for the user; ``given_up`` of the stored ``parts`` are computed."""
    if not given_up:
        return choice.reason, ()
    gain = (
        f"{1e3 * choice.forecast.ttft_s:,.0f} ms predicted, against "
        f"{1e3 * choice.load_all_s:,.0f} ms with everything loaded"
    )
    computed = f"{given_up} of {parts} stored parts computed afresh ({gain})"
    if given_up < parts:
        return f"{computed}; {choice.reason}", ()
    what = "the store is slower" if choice.waits else "blending takes longer"
    return computed, (f"{what} than computing here, so nothing was read: {gain}",)
