"""Rows and a report on deviations as the arena would print them, invented: for plots and pages."""

from __future__ import annotations

from typing import Any

KINDS = ("direct", "coreference")
RATIOS = (0.02, 0.05, 0.15)


def row(policy: str, kind: str = "all", **changes: Any) -> dict[str, Any]:
    """One row; what is not given is that of a plausible way."""
    pgr = changes.get("pgr", 0.9)
    score = changes.get("score", 0.1 + 0.8 * (pgr or 0.0))
    made = {
        "dataset": "synthetic", "seed": 7, "policy": policy, "schedule": "constant",
        "encode_prefix": True, "ratio": 0.05, "charged_ratio": 0.06, "kind": kind, "n": 40,
        "score": score, "by_context": [[5, 5 * score]] * 8, "pgr": pgr,
        "pgr_low": None if pgr is None else pgr - 0.05,
        "pgr_high": None if pgr is None else min(1.0, pgr + 0.04),
        "kl": 0.01, "ttft_ms": 30.0, "f1": 0.8, "agreement": 0.9, "n_chunks": 6, "chunk_tokens": 64,
    }  # fmt: skip
    return {**made, **changes}


def unsteered(policy: str, kind: str, pgr: float, **changes: Any) -> dict[str, Any]:
    """A way that has neither ratio nor schedule."""
    charged = changes.get("charged_ratio", 1.0)
    given = {
        "schedule": "",
        "encode_prefix": None,
        "ratio": charged,
        "charged_ratio": charged,
        **changes,
    }
    return row(policy, kind, pgr=pgr, **given)


def sweep(kinds: tuple[str, ...] = KINDS) -> list[dict[str, Any]]:
    """Baselines, two policies over three ratios and one that no ratio steers."""
    rows = []
    for k, kind in enumerate(("all", *kinds)):
        rows += [
            unsteered("none", kind, 0.0, ttft_ms=9.0, charged_ratio=0.0, kl=4.0),
            unsteered("full", kind, 1.0, ttft_ms=95.0, kl=0.0),
            unsteered("prefix", kind, 1.0, ttft_ms=81.0, kl=0.0),
            unsteered("reuse", kind, 0.2 + 0.1 * k, ttft_ms=14.0, charged_ratio=0.0, kl=1.0),
            unsteered("boundary(4)", kind, 0.55, ttft_ms=26.0, charged_ratio=0.08),
        ]
        for i, ratio in enumerate(RATIOS):
            for policy, best in (("query", 0.98), ("hkvd", 0.9)):
                extra = 0.125 if policy == "hkvd" else 0.0
                rows.append(
                    row(
                        policy, kind, ratio=ratio, charged_ratio=ratio + extra,
                        pgr=best - 0.25 / (1 + 3 * i) - 0.03 * k,
                        ttft_ms=22.0 + 300 * (ratio + extra),
                    )
                )  # fmt: skip
    return rows


def chunks() -> list[dict[str, Any]]:
    """Two policies and full prefill over the number and the length of chunks."""
    rows = []
    for n, tokens in ((3, 64), (6, 64), (12, 64), (6, 128), (6, 512)):
        size = n * tokens
        at = {"n_chunks": n, "chunk_tokens": tokens}
        rows += [
            unsteered("none", "all", 0.0, **at),
            unsteered("full", "all", 1.0, ttft_ms=0.3 * size, **at),
            row("query", pgr=0.99 - size / 40000, ttft_ms=20 + 0.05 * size, **at),
            row("hkvd", pgr=0.9 - size / 20000, ttft_ms=22 + 0.08 * size, **at),
        ]
    return rows


def deviations(layers: int = 12) -> dict[str, Any]:
    """A report of two policies and the oracle at six ratios."""
    points = []
    for policy, schedule, scale in (
        ("hkvd", "constant", 0.5), ("hkvd", "geometric", 0.45), ("query", "constant", 0.4),
        ("oracle", "", 0.55),
    ):  # fmt: skip
        for ratio in (0.0, 0.05, 0.15, 0.3, 0.6, 1.0):
            mean = round(scale * (1 - ratio) ** 2, 4)
            points.append(
                {
                    "policy": policy, "schedule": schedule, "ratio": ratio, "charged_ratio": ratio,
                    "attention": mean, "attention_low": max(0.0, mean - 0.02), "attention_high": mean + 0.02,
                    "kv": 2 * mean, "attention_by_layer": [mean] * layers,
                    "kv_by_layer": [0.0] + [2 * mean] * (layers - 1),
                }
            )  # fmt: skip
    return {
        "model": "demo", "prompts": 8, "tokens": 3072, "points": points,
        "distribution": [
            {"layer": i, "quantiles": [(q / 100) ** 4 * (1 + i / 8) for q in range(101)]}
            for i in range(1, layers)
        ],
        "correlation": [
            {"layer": i, "rho": 0.6 + 0.02 * i, "low": 0.55 + 0.02 * i, "high": 0.65 + 0.02 * i}
            for i in range(1, layers - 1)
        ],
    }  # fmt: skip
