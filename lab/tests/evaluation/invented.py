"""Rows as the arena would print them, invented."""

from __future__ import annotations

from typing import Any

from blendrag_lab.evaluation.rows import ArenaRow


def by_context(*right: float) -> tuple[tuple[int, float], ...]:
    """Right answers of five questions, for each context."""
    return tuple((5, score) for score in right)


def row(policy: str, kind: str = "all", pgr: float | None = 0.9, **changes: Any) -> ArenaRow:
    """A plausible row with ``changes``."""
    score = changes.get("score", 0.1 + 0.8 * (pgr or 0.0))
    made = {
        "dataset": "synthetic", "seed": 7, "policy": policy, "schedule": "constant",
        "encode_prefix": True, "ratio": 0.05, "charged_ratio": 0.06, "kind": kind, "n": 40,
        "score": score, "by_context": by_context(*[5 * score] * 8), "pgr": pgr,
        "pgr_low": None if pgr is None else pgr - 0.05,
        "pgr_high": None if pgr is None else min(1.0, pgr + 0.04),
        "kl": 0.01, "ttft_ms": 30.0, "metric": "accuracy", "accuracy": score, "f1": 0.8,
        "rouge_l": None, "agreement": 0.9, "same_answer": 0.8, "n_chunks": 6, "chunk_tokens": 64,
    }  # fmt: skip
    return ArenaRow(**{**made, **changes})


def baseline(
    policy: str, kind: str = "all", pgr: float = 1.0, charged: float = 1.0, **changes: Any
) -> ArenaRow:
    """A way without ratio and schedule."""
    given = {"schedule": "", "encode_prefix": None, "ratio": charged, "charged_ratio": charged}
    return row(policy, kind, pgr, **{**given, **changes})
