"""Deviations of many prompts: against the ratio, over tokens, and from layer to layer.

Owns what figures 6, 7 and 8 of CacheBlend show, as numbers: :func:`measure` holds every prompt against
its full prefill (:mod:`blendrag.lab.evaluation.deviation`) and averages. Layer 0 is left out wherever KV
is compared: what its K and V are computed from does not depend on other chunks. Draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from blendrag.errors import InvalidInputError
from blendrag.lab.evaluation.deviation import Deviation, StoredPrompt

#: Name of the curve whose tokens are chosen knowing the full prefill (figure 6 of the paper).
ORACLE = "oracle"
#: Shares of tokens at which the distribution of Δ_kv is kept.
SHARES = tuple(i / 100 for i in range(101))
#: Share of the intervals' distribution below their upper end: intervals of 95%.
UPPER = 0.975


@dataclass(frozen=True)
class DeviationPoint:
    """One policy, schedule and ratio; means over prompts, 95% intervals of those over all layers."""

    policy: str
    schedule: str
    ratio: float
    charged_ratio: float
    attention: float
    """Mean over layers of Δ_attn, relative to full prefill's."""
    attention_low: float
    attention_high: float
    kv: float
    """Mean over layers 1…L-1 and tokens of Δ_kv, relative too."""
    attention_by_layer: tuple[float, ...]
    kv_by_layer: tuple[float, ...]


@dataclass(frozen=True)
class LayerDistribution:
    """Δ_kv of stored KV in one layer: its quantiles at :data:`SHARES` over the tokens of all prompts."""

    layer: int
    quantiles: tuple[float, ...]


@dataclass(frozen=True)
class LayerCorrelation:
    """Spearman's rank correlation of the tokens' Δ_kv in ``layer`` and the next; over prompts."""

    layer: int
    rho: float
    low: float
    high: float


@dataclass(frozen=True)
class DeviationReport:
    """Everything measured of one model over one set of prompts."""

    model: str
    prompts: int
    tokens: int
    """Chunk tokens of all prompts."""
    points: tuple[DeviationPoint, ...]
    distribution: tuple[LayerDistribution, ...]
    correlation: tuple[LayerCorrelation, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    prompts: Iterable[StoredPrompt],
    policies: Sequence[str],
    schedules: Sequence[str],
    ratios: Sequence[float],
    tick: Callable[[], None] = lambda: None,
) -> DeviationReport:
    """Blends every prompt by every policy, schedule and ratio, and the oracle at every ratio.

    Prompts are taken one at a time, so that an iterator holds the KV of one only. ``tick()`` is
    called after each. Raises :class:`InvalidInputError` where there is no prompt.
    """
    ways = [(p, s, r) for p in policies for s in schedules for r in ratios]
    ways += [(ORACLE, "", r) for r in ratios]
    found: list[list[Deviation]] = [[] for _ in ways]
    stored: list[Deviation] = []
    model = ""
    for prompt in prompts:
        model = prompt.adapter.model_id
        stored.append(prompt.deviation("reuse"))
        for (policy, schedule, ratio), into in zip(ways, found, strict=True):
            oracle = policy == ORACLE
            into.append(
                prompt.oracle(ratio) if oracle else prompt.deviation(policy, schedule, ratio)
            )
        tick()
    if not stored:
        raise InvalidInputError("no prompt to measure deviations on; give at least one context")
    return DeviationReport(
        model=model,
        prompts=len(stored),
        tokens=sum(one.kv.shape[1] for one in stored),
        points=tuple(_point(*way, of) for way, of in zip(ways, found, strict=True)),
        distribution=distribution(stored),
        correlation=correlation(stored),
    )


def distribution(stored: Sequence[Deviation]) -> tuple[LayerDistribution, ...]:
    """Figure 7, of each layer from 1 on."""
    kv = np.concatenate([one.kv for one in stored], axis=1)  # [L, n of all prompts]
    return tuple(
        LayerDistribution(layer, tuple(np.quantile(kv[layer], SHARES).tolist()))
        for layer in range(1, len(kv))
    )


def correlation(stored: Sequence[Deviation]) -> tuple[LayerCorrelation, ...]:
    """Figure 8: of layers 1 and 2, 2 and 3, …, the mean over prompts and its 95% interval."""
    found = []
    for layer in range(1, len(stored[0].kv) - 1):
        rhos = [float(stats.spearmanr(*one.kv[layer : layer + 2]).statistic) for one in stored]
        found.append(LayerCorrelation(layer, *_mean_interval(rhos)))
    return tuple(found)


def _point(policy: str, schedule: str, ratio: float, of: Sequence[Deviation]) -> DeviationPoint:
    attention = np.stack([one.attention_by_layer for one in of])  # [prompts, L]
    kv = np.stack([one.kv_by_layer for one in of])  # [prompts, L]
    mean, low, high = _mean_interval(attention.mean(axis=1).tolist())
    return DeviationPoint(
        policy=policy,
        schedule=schedule,
        ratio=ratio,
        charged_ratio=float(np.mean([one.charged_ratio for one in of])),
        attention=mean,
        attention_low=low,
        attention_high=high,
        kv=float(kv[:, 1:].mean()),
        attention_by_layer=tuple(attention.mean(axis=0).tolist()),
        kv_by_layer=tuple(kv.mean(axis=0).tolist()),
    )


def _mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95% interval; the interval is the mean where a single value says nothing of it."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, mean, mean
    # Student's: prompts are few, and their spread is an estimate as well.
    reach = float(stats.t.ppf(UPPER, len(values) - 1) * stats.sem(values))
    return mean, mean - reach, mean + reach
