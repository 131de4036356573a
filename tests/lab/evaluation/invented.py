"""Rows and a report on deviations as the arena would print them, invented: for plots and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from blendrag.lab.evaluation.deviation import (
    DeviationPoint,
    DeviationReport,
    LayerCorrelation,
    LayerDistribution,
)
from blendrag.lab.evaluation.rows import ArenaRow

KINDS = ("direct", "coreference", "unanswerable")
RATIOS = (0.02, 0.05, 0.15)


def by_context(*right: float) -> tuple[tuple[int, float], ...]:
    """Right answers of five questions, for each context."""
    return tuple((5, score) for score in right)


def row(policy: str, kind: str = "all", **changes: Any) -> ArenaRow:
    """A plausible row with ``changes``."""
    pgr = changes.get("pgr", 0.9)
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


def baseline(policy: str, kind: str = "all", pgr: float | None = 1.0, **changes: Any) -> ArenaRow:
    """A way without ratio and schedule."""
    charged = changes.pop("charged_ratio", 1.0)
    given = {"schedule": "", "encode_prefix": None, "ratio": charged, "charged_ratio": charged}
    return row(policy, kind, pgr=pgr, **{**given, **changes})


def sweep(**changes: Any) -> list[ArenaRow]:
    """Baselines, two policies over three ratios and ``boundary``; PGR of ``unanswerable`` is undefined."""
    rows = []
    for k, kind in enumerate(("all", *KINDS)):
        rows += [
            baseline("none", kind, 0.0, ttft_ms=9.0, charged_ratio=0.0, kl=4.0, **changes),
            baseline("full", kind, 1.0, ttft_ms=95.0, kl=0.0, **changes),
            baseline("reuse", kind, 0.2 + 0.1 * k, ttft_ms=14.0, charged_ratio=0.0, **changes),
            baseline("boundary(4)", kind, 0.55, ttft_ms=26.0, charged_ratio=0.08, **changes),
        ]
        for i, ratio in enumerate(RATIOS):
            for policy, best in (("query", 0.98), ("hkvd", 0.9)):
                extra = 0.125 if policy == "hkvd" else 0.0
                rows.append(
                    row(
                        policy, kind, ratio=ratio, charged_ratio=ratio + extra,
                        pgr=best - 0.25 / (1 + 3 * i) - 0.03 * k,
                        ttft_ms=22.0 + 300 * (ratio + extra), **changes,
                    )
                )  # fmt: skip
    unknown = {"pgr": None, "pgr_low": None, "pgr_high": None}
    return [ArenaRow(**{**asdict(r), **(unknown if r.kind == KINDS[2] else {})}) for r in rows]


def chunks() -> list[ArenaRow]:
    """Two policies and full prefill over the number and the length of chunks."""
    rows = []
    for n, tokens in ((3, 64), (6, 64), (12, 64), (6, 128), (6, 512)):
        size = n * tokens
        at = {"n_chunks": n, "chunk_tokens": tokens}
        rows += [
            baseline("full", ttft_ms=0.3 * size, **at),
            row("query", pgr=0.99 - size / 40000, ttft_ms=20 + 0.05 * size, **at),
            row("hkvd", pgr=0.9 - size / 20000, ttft_ms=22 + 0.08 * size, **at),
        ]
    return rows


def schedules(names: Sequence[str] = ("constant", "linear", "calibrated")) -> list[ArenaRow]:
    pairs = [(policy, name) for policy in ("query", "hkvd") for name in names]
    return [baseline("full"), *(row(policy, schedule=name) for policy, name in pairs)]


def prefix() -> list[ArenaRow]:
    return [baseline("full"), *(row("query", encode_prefix=on) for on in (True, False))]


def deviations(layers: int = 12) -> DeviationReport:
    """Two policies and the oracle at six ratios."""
    points = []
    for policy, schedule, scale in (
        ("hkvd", "constant", 0.5), ("query", "constant", 0.4), ("oracle", "", 0.55),
    ):  # fmt: skip
        for ratio in (0.0, 0.05, 0.15, 0.3, 0.6, 1.0):
            mean = round(scale * (1 - ratio) ** 2, 4)
            bounds = (max(0.0, mean - 0.02), mean + 0.02)
            by_layer = ([mean] * layers, [0.0] + [2 * mean] * (layers - 1))
            points.append(
                DeviationPoint(policy, schedule, ratio, ratio, mean, *bounds, 2 * mean, *by_layer)
            )
    return DeviationReport(
        "demo",
        prompts=8,
        tokens=3072,
        points=points,
        distribution=[
            LayerDistribution(i, [(q / 100) ** 4 * (1 + i / 8) for q in range(101)])
            for i in range(1, layers)
        ],
        correlation=[
            LayerCorrelation(i, 0.6 + 0.02 * i, 0.55 + 0.02 * i, 0.65 + 0.02 * i)
            for i in range(1, layers - 1)
        ],
    )
