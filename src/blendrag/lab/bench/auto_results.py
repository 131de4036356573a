"""What is compared of an automatic ratio and fixed ones: single requests, and what follows for a tier."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blendrag.lab.bench.tiers import BenchTier

#: A prediction is good if it is off by no more than this share of what was measured.
CLOSE = 0.15
AUTO = "auto"


@dataclass(frozen=True)
class Run:
    """One request: measured and predicted seconds, and the ratio it ran at."""

    seconds: float
    predicted_s: float
    ratio: float
    loaded: int
    """Chunks that were loaded, not computed."""

    @property
    def is_close(self) -> bool:
        return abs(self.predicted_s - self.seconds) <= CLOSE * self.seconds


@dataclass(frozen=True)
class AutoRow:
    """One ratio from one tier; medians."""

    asked: str
    """A ratio, or ``"auto"``."""
    ratio: float
    loaded: int
    ms: float
    spread_ms: tuple[float, float]
    predicted_ms: float


@dataclass(frozen=True)
class TierResult:
    """One tier."""

    tier: str
    rows: tuple[AutoRow, ...]
    auto_ms: float
    best_ms: float
    best_ratio: float
    relative: float
    """The automatic ratio's time over the best fixed one's."""
    close: float
    """Share of requests whose prediction was within :data:`CLOSE`."""
    auto_close: float
    """The same of those at the automatic ratio alone."""


@dataclass(frozen=True)
class AutoResult:
    """One run."""

    model: str
    device: str
    policy: str
    encoding: str
    prompt_tokens: int
    min_ratio: float
    tiers: tuple[TierResult, ...]
    close: float
    """Over all tiers."""
    auto_close: float
    requests: int
    rounds: int
    profile: dict[str, Any]
    """What was measured before, and predictions follow from."""


def tier_result(tier: BenchTier, found: Sequence[tuple[float | None, list[Run]]]) -> TierResult:
    rows = tuple(_row(ratio, runs) for ratio, runs in found)
    auto = next(row for row in rows if row.asked == AUTO)
    best = min((row for row in rows if row.asked != AUTO), key=lambda row: row.ms)
    every = [run for _, runs in found for run in runs]
    return TierResult(
        tier=tier.name,
        rows=rows,
        auto_ms=auto.ms,
        best_ms=best.ms,
        best_ratio=best.ratio,
        relative=auto.ms / best.ms,
        close=share_close(every),
        auto_close=share_close([run for ratio, runs in found if ratio is None for run in runs]),
    )


def share_close(runs: Sequence[Run]) -> float:
    return statistics.fmean(run.is_close for run in runs)


def _row(ratio: float | None, runs: Sequence[Run]) -> AutoRow:
    times = [1e3 * run.seconds for run in runs]
    return AutoRow(
        asked=AUTO if ratio is None else f"{ratio:g}",
        ratio=statistics.median(run.ratio for run in runs),
        loaded=min(run.loaded for run in runs),
        ms=statistics.median(times),
        spread_ms=(min(times), max(times)),
        predicted_ms=1e3 * statistics.median(run.predicted_s for run in runs),
    )
