"""Logs one line per request at INFO: what was reused, what was not and why."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from blendrag.errors import RequestCancelled, RequestTimeout
from blendrag.metrics import ChunkReport, RequestMetrics

log = logging.getLogger(__name__)

#: Chunks named per reason; more are only counted.
NAMED = 8


def log_answer(metrics: RequestMetrics) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("%s", wording(metrics))


def log_failure(exc: BaseException, started: float) -> None:
    """Log that a request ended without an answer, and after how long."""
    after = time.perf_counter() - started
    if isinstance(exc, RequestTimeout):
        log.info("no answer: stopped by its timeout of %g s, after %.3f s", exc.timeout_s, after)
    elif isinstance(exc, RequestCancelled):
        log.info("no answer: abandoned by its caller after %.3f s", after)
    else:
        log.info("no answer: %s after %.3f s", type(exc).__name__, after)


def wording(metrics: RequestMetrics) -> str:
    m = metrics
    parts = [
        f"mode {m.mode}: {m.prompt_tokens} prompt tokens, {m.reused_tokens} reused "
        f"({m.recomputed_tokens} of them recomputed), {m.fresh_tokens} fresh",
        f"first token after {m.ttft_s:.3f} s, {m.new_tokens} new in {m.total_s:.3f} s, "
        f"decode weights {m.decode_weights}",
    ]
    if m.batch_size > 1:
        parts.append(f"prefilled together with {m.batch_size - 1} of its batch")
    missed = [chunk for chunk in m.chunks if chunk.outcome == "computed"]
    if missed:
        parts.append(f"{len(missed)} of {len(m.chunks)} chunks not reused: {_reasons(missed)}")
    return "; ".join((*parts, *m.notes))


def _reasons(missed: Sequence[ChunkReport]) -> str:
    """The chunks by reason, each as the start of its id and its source."""
    named: dict[str, list[str]] = {}
    for chunk in missed:
        short = chunk.chunk_id[:12]
        name = f"{chunk.source}#{short}" if chunk.source else short
        named.setdefault(chunk.reason, []).append(name)
    return ", ".join(
        " ".join(names[:NAMED])
        + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        + f" ({reason})"
        for reason, names in named.items()
    )
