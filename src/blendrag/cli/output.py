"""What is printed: JSON and results on stdout, everything said about them on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from blendrag.cli.status import say

if TYPE_CHECKING:
    from blendrag.engine import Answer, DryRun, IngestReport
    from blendrag.fusor.gate_record import Verification
    from blendrag.metrics import RequestMetrics

#: Of a schedule's name in the line of metrics.
SCHEDULE_CHARS = 60


def print_json(fields: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """An object or a list on one line; a number that JSON has no word for (NaN, infinity) is null."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "")
    typer.echo(json.dumps(_finite(fields), ensure_ascii=encoding != "utf8", allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def count(number: int, noun: str) -> str:
    """``"1 chunk"``, ``"2,000 chunks"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def print_ingest(report: IngestReport) -> None:
    typer.echo(
        f"{count(report.documents, 'document')} ({report.documents_unchanged:,} unchanged), "
        f"{count(report.chunks, 'chunk')}: {report.chunks_computed:,} computed, "
        f"{report.chunks_skipped:,} already there; {report.failed} failed; "
        f"{megabytes(report.bytes)} at {report.tokens_per_s:,.0f} tokens/s "
        f"in {duration(report.seconds)}"
    )


def print_dry_run(plan: DryRun) -> None:
    typer.echo(
        f"{count(plan.documents, 'document')}, {count(plan.chunks, 'chunk')}, "
        f"{count(plan.tokens, 'token')}: "
        f"{megabytes(plan.bytes)} of KV, about {duration(plan.seconds)}; {plan.failed} failed; "
        "nothing was written"
    )


def answer_fields(answer: Answer) -> dict[str, Any]:
    """The JSON of ``ask``."""
    return {
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "metrics": answer.metrics.as_dict(),
        "sources": [
            {
                "source": s.source,
                "title": s.title,
                "chunk_id": s.chunk_id,
                "distance": s.distance,
                "text": s.text,
            }
            for s in answer.sources
        ],
    }


def say_metrics(metrics: RequestMetrics) -> None:
    """One line on stderr, and the notes a user should see."""
    how = f", {metrics.policy} at ratio {metrics.ratio:.2f}" if metrics.policy else ""
    say(
        "metrics",
        f"first token after {1e3 * metrics.ttft_s:,.0f} ms{_predicted(metrics)} "
        f"(loading {1e3 * metrics.load_s:,.0f} ms), "
        f"{metrics.prompt_tokens} prompt tokens: {metrics.reused_tokens} reused, "
        f"{metrics.recomputed_tokens} of them recomputed, {metrics.fresh_tokens} fresh; "
        f"mode {metrics.mode}{how}{_schedule(metrics)}",
    )
    if metrics.decision:
        say("decision", metrics.decision)
    for note in metrics.notes:
        say("note", note)


def _predicted(metrics: RequestMetrics) -> str:
    predicted = metrics.predicted_ttft_s
    return "" if predicted is None else f", {1e3 * predicted:,.0f} predicted"


def _schedule(metrics: RequestMetrics) -> str:
    """That really ran; a long vector by its beginning, whose whole is in the JSON."""
    from blendrag.fusor.selection import make_policy

    if not metrics.policy or not make_policy(metrics.policy).follows_schedule:
        return ""
    text = metrics.schedule
    if len(text) > SCHEDULE_CHARS:
        text = f"{text[:SCHEDULE_CHARS].rpartition(',')[0]},…"
    return f", schedule {text}"


def print_verification(model: str, result: Verification) -> None:
    typer.echo(f"{model}: {result.verdict}")
    typer.echo(f"  {result.reason}")
    if result.layers:
        kinds = {kind: result.layers.count(kind) for kind in dict.fromkeys(result.layers)}
        typer.echo(f"  layers: {', '.join(f'{n} {kind}' for kind, n in kinds.items())}")
    differences = {
        "everything recomputed (r = 1.0)": result.max_logit_diff,
        "a fifth recomputed over loaded KV": result.subset_logit_diff,
        "the same over disturbed KV": result.perturbed_logit_diff,
    }
    for what, value in differences.items():
        if value is not None:
            typer.echo(f"  largest logit difference, {what}: {value:.3g}")
    if result.greedy_equal is not None:
        typer.echo(
            f"  greedy continuation equal to stock: {'yes' if result.greedy_equal else 'no'}"
        )
