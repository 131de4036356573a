"""What will be done with one prompt: what is loaded, what is computed and why, at which ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from blendrag.fusor import BlendRequest
from blendrag.fusor.loader import LoadedSpan
from blendrag.fusor.selection import Blending
from blendrag.metrics import ChunkOutcome, ChunkReport
from blendrag.planning.estimate import Forecast
from blendrag.text.prompt import Segment, SegmentedPrompt


class Reason(NamedTuple):
    """Why a chunk is loaded or computed."""

    text: str
    """For people."""
    is_missing: bool = False
    """Whether the store lacks KV of the chunk."""
    is_leading: bool = False
    """Whether the chunk is part of the leading span."""


MODE_FULL = Reason("mode full computes every token")
IN_MEMORY = Reason("part of an exact prefix in memory", is_leading=True)


class MissingKV(NamedTuple):
    """A whole chunk that has no stored KV."""

    ids: tuple[int, ...]
    scope: str | None
    """Where it was learned from prompts; ``None`` for a chunk of a document."""

    @classmethod
    def of(cls, segment: Segment) -> MissingKV:
        return cls(segment.stored_ids, segment.scope)


class PlannedChunk(NamedTuple):
    """One chunk of the prompt; ``span`` is ``None`` if it is computed."""

    segment: Segment
    reason: Reason
    span: LoadedSpan | None = None


@dataclass(frozen=True)
class Plan:
    """Holds open readers: close it when the prompt is prefilled."""

    prompt: SegmentedPrompt
    chunks: tuple[PlannedChunk, ...]
    blending: Blending
    leading_span: LoadedSpan | None = None
    """The first tokens, if their KV is stored or in memory. Chunks inside it have no span of their own."""
    leading: tuple[int, ...] = ()
    """Ids of the tokens before the first chunk, if they are worth storing and are not stored."""
    forecast: Forecast | None = None
    """From now to the first token; ``None`` without a machine profile."""
    decision: str = ""
    """Why this ratio and these loads, if the ratio was left to the controller."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""

    @classmethod
    def computed(cls, prompt: SegmentedPrompt, reason: Reason, notes: tuple[str, ...] = ()) -> Plan:
        """Load nothing."""
        chunks = tuple(PlannedChunk(segment, reason) for segment in prompt.chunks)
        return cls(prompt, chunks, Blending.of("full"), notes=notes)

    def behind(self, beginning: LoadedSpan | None) -> Plan:
        """This plan, that loads nothing, behind a ``beginning`` in memory."""
        if beginning is None:
            return self
        chunks = tuple(
            chunk._replace(reason=IN_MEMORY) if chunk.segment.end <= beginning.end else chunk
            for chunk in self.chunks
        )
        return replace(self, chunks=chunks, leading_span=beginning)

    def without(self, why: Mapping[int, Reason]) -> Plan:
        """This plan without the spans that begin at these tokens, for these reasons. Closes their readers."""
        for span in self.spans:
            if span.start in why:
                span.reader.close()
        chunks = tuple(
            PlannedChunk(segment, why[span.start]) if span and span.start in why else chunk
            for chunk in self.chunks
            for segment, _, span in [chunk]
        )
        leads = self.leading_span is not None and self.leading_span.start not in why
        return replace(self, chunks=chunks, leading_span=self.leading_span if leads else None)

    @property
    def spans(self) -> tuple[LoadedSpan, ...]:
        """Everything that is loaded, in the order of the prompt."""
        spans = (self.leading_span, *(chunk.span for chunk in self.chunks))
        return tuple(span for span in spans if span is not None)

    @property
    def missing(self) -> tuple[MissingKV, ...]:
        missing = (c.segment for c in self.chunks if c.reason.is_missing)
        return tuple(map(MissingKV.of, missing))

    @property
    def chunks_end(self) -> int:
        """Where the last chunk ends and the question begins."""
        return max((chunk.segment.end for chunk in self.chunks), default=0)

    @property
    def reused_tokens(self) -> int:
        return sum(span.tokens for span in self.spans)

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the leading span that are in no chunk."""
        if self.leading_span is None:
            return 0
        end = self.leading_span.end
        chunks = (chunk.segment for chunk in self.chunks)
        inside = sum(max(0, min(s.end, end) - s.position) for s in chunks)
        return end - inside

    def request(self, prompt_tokens: int) -> BlendRequest:
        """The fusor's part of the plan, for the first ``prompt_tokens`` of the prompt."""
        return BlendRequest(prompt_tokens, self.spans, self.blending, self.chunks_end)

    def reports(
        self, recomputed: Sequence[float], source_of: Mapping[str, str], shows_tiers: bool = True
    ) -> tuple[ChunkReport, ...]:
        """One report per chunk for the metrics.

        ``recomputed``: mean recomputed tokens of each blended span, in order.
        """
        per_span = iter(recomputed)
        reports = []
        for segment, reason, span in self.chunks:
            assert segment.chunk_id is not None
            loaded = span
            if loaded is None and reason.is_leading:
                loaded = self.leading_span
            source = source_of.get(segment.chunk_id, "")
            tier = loaded.reader.tier if loaded and shows_tiers else ""
            tokens = len(segment.ids)
            outcome: ChunkOutcome
            if loaded is None:
                outcome, computed = "computed", float(tokens)
            elif loaded.exact:
                outcome, computed = "exact", 0.0
            else:
                computed = next(per_span, 0.0)
                outcome = "blended" if computed > 0 else "reused"
            reports.append(
                ChunkReport(
                    segment.chunk_id, source, tokens, outcome, round(computed), reason.text, tier
                )
            )
        return tuple(reports)

    def close(self) -> None:
        """Close every reader. Idempotent."""
        for span in self.spans:
            span.reader.close()
