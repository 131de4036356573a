"""What can be loaded of one prompt, opened: spans, with a reason for every chunk.

A chunk can be loaded iff its KV is stored for this model, behind this corpus's prefix; anything in doubt is
computed. Whether it pays is decided afterwards, from estimates (:mod:`blendrag.planning.decide`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blendrag.config import Mode
from blendrag.fusor.loader import LoadedSpan
from blendrag.model.adapter import ModelAdapter
from blendrag.store.base import KVReader, KVStore
from blendrag.store.identity import NATIVE_ENCODING, chunk_key
from blendrag.text.prompt import PromptPlan, Segment

#: Longest leading part kept as an exact prefix, in tokens.
LEADING_MAX_TOKENS = 4096


@dataclass(frozen=True)
class ChunkDecision:
    """What is done with one chunk of the prompt, and why; ``span`` is ``None`` if it is computed."""

    segment: Segment
    span: LoadedSpan | None
    reason: str


@dataclass(frozen=True)
class LoadPlan:
    """Spans to load, decisions per chunk, and what could be encoded after the answer."""

    spans: tuple[LoadedSpan, ...]
    decisions: tuple[ChunkDecision, ...]
    missing: tuple[tuple[int, ...], ...]
    """Ids of whole chunks without stored KV."""
    leading: tuple[int, ...]
    """Leading ids that are worth an exact-prefix entry and have none."""

    encoding: str = NATIVE_ENCODING
    """How what is to be loaded is stored."""

    @property
    def chunks_end(self) -> int:
        """Behind the last chunk, loaded or not: where the prompt's own question begins."""
        return max((decision.segment.end for decision in self.decisions), default=0)

    @property
    def reused_tokens(self) -> int:
        return sum(span.tokens for span in self.spans)

    def close(self) -> None:
        """Release every reader. Idempotent."""
        for span in self.spans:
            span.reader.close()


class Controller:
    """Plans loads for one model and one corpus prefix."""

    def __init__(
        self,
        adapter: ModelAdapter,
        store: KVStore,
        namespace: str,
        prefix_ids: Sequence[int],
        prefix_min_tokens: int,
        encoding: str = NATIVE_ENCODING,
    ) -> None:
        """``encoding``: how what is stored under ``namespace`` is kept."""
        self._adapter = adapter
        self._store = store
        self._namespace = namespace
        self.prefix_ids = tuple(prefix_ids)
        self._prefix_min_tokens = prefix_min_tokens
        self._encoding = encoding

    def plan(
        self,
        plan: PromptPlan,
        mode: Mode,
        avoid: frozenset[str] = frozenset(),
        reserve: int = 1,
    ) -> LoadPlan:
        """Open what ``mode`` may load; keys in ``avoid`` failed already and are computed.

        The prompt's last ``reserve`` tokens are always computed: their logits are wanted.
        """
        if mode == "full":
            return nothing_loaded(plan, "mode full computes every token")
        namespace = self._namespace
        spans: list[LoadedSpan] = []
        decisions: list[ChunkDecision] = []
        missing: list[tuple[int, ...]] = []
        last = len(plan.ids) - reserve
        leading_span, leading = self._leading(plan, namespace, avoid, last)
        if leading_span is not None:
            spans.append(leading_span)
        for segment in plan.chunks:
            decision = self._decide(segment, plan, mode, namespace, avoid, last)
            decisions.append(decision)
            if decision.span is not None:
                spans.append(decision.span)
            elif decision.reason is NO_KV:
                missing.append(segment.stored_ids)
        return LoadPlan(tuple(spans), tuple(decisions), tuple(missing), leading, self._encoding)

    def missing(self, plan: PromptPlan) -> list[tuple[int, ...]]:
        """Ids of the whole chunks in ``plan`` that no tier has, each once; nothing is opened."""
        wanted = dict.fromkeys(segment.stored_ids for segment in plan.chunks if segment.complete)
        return [ids for ids in wanted if not self._has(ids)]

    def _has(self, ids: tuple[int, ...]) -> bool:
        key = chunk_key(self._namespace, self.prefix_ids, ids)
        return self._store.contains(self._namespace, key)

    def _leading(
        self, plan: PromptPlan, namespace: str, avoid: frozenset[str], last: int
    ) -> tuple[LoadedSpan | None, tuple[int, ...]]:
        """The part before the first chunk as an exact prefix: (its span, ids to encode later)."""
        ids = plan.leading_ids
        end = min(len(ids), last)
        fits = self._prefix_min_tokens <= len(ids) <= LEADING_MAX_TOKENS
        if not (plan.chunks and fits and end > 0):
            return None, ()
        reader = self._open(namespace, chunk_key(namespace, (), ids), len(ids), avoid)
        if reader is None:
            return None, ids
        return LoadedSpan(0, end, reader, 0, exact=True), ()

    def _decide(
        self,
        segment: Segment,
        plan: PromptPlan,
        mode: Mode,
        namespace: str,
        avoid: frozenset[str],
        last: int,
    ) -> ChunkDecision:
        at = segment.position
        exact = at == len(self.prefix_ids) and plan.ids[:at] == self.prefix_ids
        if mode == "prefix" and not exact:
            return ChunkDecision(
                segment, None, "mode prefix reuses a chunk only behind the corpus's own prefix"
            )
        end = min(segment.end, last)
        if end <= at:
            return ChunkDecision(
                segment, None, "all of the chunk is among the prompt's last tokens"
            )
        key = chunk_key(namespace, self.prefix_ids, segment.stored_ids)
        reader = self._open(namespace, key, len(segment.stored_ids), avoid)
        if reader is None:
            return ChunkDecision(segment, None, CORRUPT if key in avoid else NO_KV)
        span = LoadedSpan(at, end, reader, len(self.prefix_ids), exact)
        return ChunkDecision(segment, span, _reason(segment, span))

    def _open(
        self, namespace: str, key: str, tokens: int, avoid: frozenset[str]
    ) -> KVReader | None:
        if key in avoid:
            return None
        layout = self._adapter.layout.encoded(self._encoding)
        return self._store.open(namespace, key, layout, tokens)


def nothing_loaded(plan: PromptPlan, reason: str) -> LoadPlan:
    """Every chunk of ``plan`` is computed, for ``reason``."""
    return LoadPlan((), tuple(ChunkDecision(c, None, reason) for c in plan.chunks), (), ())


NO_KV = "no KV stored for this model and prefix; encoded after the answer"
CORRUPT = "stored KV failed verification and was set aside; computed"


def _reason(segment: Segment, span: LoadedSpan) -> str:
    if span.exact:
        return "stands behind the very prefix it was encoded with"
    moved = f"moved by {span.offset} positions"
    if not segment.complete:
        return f"tail cut off: {len(segment.ids)} of {len(segment.stored_ids)} tokens, {moved}"
    return moved
