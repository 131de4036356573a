"""What happened to each chunk of a prompt, in the words of the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blendrag.metrics import ChunkOutcome, ChunkReport
from blendrag.planning.controller import ChunkDecision


def report(
    decisions: Sequence[ChunkDecision], recomputed: Sequence[float], source_of: dict[str, str]
) -> tuple[ChunkReport, ...]:
    """Chunk reports; ``recomputed`` has the mean recomputed tokens of each blended span, in order."""
    shares = iter(recomputed)
    reports = []
    for decision in decisions:
        segment, span = decision.segment, decision.span
        assert segment.chunk_id is not None
        base = ChunkReport(
            chunk_id=segment.chunk_id,
            source=source_of.get(segment.chunk_id, ""),
            tokens=len(segment.ids),
            outcome="computed",
            recomputed_tokens=len(segment.ids),
            reason=decision.reason,
        )
        if span is not None:
            share = 0.0 if span.exact else next(shares, 0.0)
            tokens = round(share)
            outcome: ChunkOutcome = "blended" if share > 0 else "reused"
            base = replace(
                base,
                outcome="exact" if span.exact else outcome,
                recomputed_tokens=tokens,
                tier=span.reader.tier,
            )
        reports.append(base)
    return tuple(reports)
