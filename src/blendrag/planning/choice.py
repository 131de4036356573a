"""What to load and at which recompute ratio, from estimates alone.

CacheBlend §5.1 takes the larger of two ratios: the one whose recompute just hides behind the load, and the
smallest that keeps quality. Beyond the paper, a chunk is computed instead of loaded where that is faster;
this is decided first, at the smallest ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from blendrag.planning.estimate import Estimator, Forecast, LoadEstimate

#: Recompute is hidden if a prefill takes at most this share longer than at the smallest ratio (estimates are
#: no more precise, and the last layer's recompute never hides) and this share of the added compute hides.
HIDDEN_SLACK, HIDDEN_SHARE = 0.03, 0.5
#: Computing what could be loaded must make the prompt faster by this share: estimates are no more precise.
MIN_SPEEDUP_SHARE = 0.1
#: Step between the ratios that are tried.
RATIO_STEP = 0.01
#: Error of a sum of times, as a share of it.
TIME_ROUNDING = 1e-9

#: ``at(estimate, ratio)``: the forecast with what a policy recomputes at that ratio.
At = Callable[[LoadEstimate, float], Forecast]


@dataclass(frozen=True)
class Choice:
    loaded: tuple[int, ...]
    """Indices of the prompt's parts."""
    ratio: float
    forecast: Forecast
    load_all_s: float
    """Predicted TTFT with everything loaded, at the smallest ratio."""
    reason: str
    waits: bool
    """Whether the prompt would wait for its loads if all were loaded."""


def choose(estimator: Estimator, at: At, min_ratio: float, budgeted: bool) -> Choice:
    """The fastest set of parts to load, then the largest ratio that costs no time.

    ``budgeted``: whether the policy recomputes more at a larger ratio.
    """
    loaded, load_all_s, waits = _what_to_load(estimator, at, min_ratio)
    estimate = estimator.loading(loaded)
    ratio = min_ratio
    least = chosen = at(estimate, min_ratio)
    if not estimate.candidates:
        reason = "nothing is loaded that could be recomputed"
    elif not budgeted:
        reason = "the policy recomputes the same tokens at any ratio"
    else:
        ratio = _largest_ratio(lambda ratio: at(estimate, ratio), least, min_ratio)
        chosen = at(estimate, ratio)
        if ratio <= min_ratio:
            why = "the smallest that keeps quality; more would not hide behind the load"
        elif chosen.compute_s - least.compute_s <= 2 * TIME_ROUNDING * least.ttft_s:
            why = "the largest that is computed in no more time than the smallest"
        else:
            why = "the largest whose recompute hides behind the load"
        reason = f"ratio {ratio:.2f}: {why}"
    return Choice(loaded, ratio, chosen, load_all_s, reason, waits)


def _what_to_load(
    estimator: Estimator, at: At, ratio: float
) -> tuple[tuple[int, ...], float, bool]:
    """Indices to load, the TTFT with all loaded, and whether that would wait for loads.

    Tries to drop parts one after the other, slowest per token first, and takes the fastest of these sets:
    optimal for parts of one length. For parts of several lengths, the best change of one part follows.
    """
    parts = estimator.prompt.parts

    def seconds(chosen: frozenset[int]) -> float:
        return at(estimator.loading(sorted(chosen)), ratio).ttft_s

    every, none = frozenset(range(len(parts))), frozenset[int]()
    load_all = at(estimator.loading(), ratio)
    times = {every: load_all.ttft_s, none: seconds(none)}
    # Loads that take no time would make the prompt faster by this share, else no part is worth computing.
    waits = load_all.ttft_s - load_all.compute_s > MIN_SPEEDUP_SHARE * load_all.ttft_s
    if waits:
        slowest = sorted(every, key=lambda i: -estimator.load_s(i) / parts[i].tokens)
        sets = [frozenset(slowest[n:]) for n in range(1, len(slowest))]
        times |= {chosen: seconds(chosen) for chosen in sets}
        if len({part.tokens for part in parts}) > 1:
            fastest = min(times, key=times.__getitem__)
            changed = [fastest ^ {i} for i in every]
            times |= {chosen: seconds(chosen) for chosen in changed}
    best = min(times, key=times.__getitem__)
    is_worth = times[best] <= (1 - MIN_SPEEDUP_SHARE) * load_all.ttft_s
    return tuple(sorted(best if is_worth else every)), load_all.ttft_s, waits


def _largest_ratio(at: Callable[[float], Forecast], least: Forecast, min_ratio: float) -> float:
    """The largest ratio, in steps, that costs no time over ``least``.

    Time grows with the ratio, except at 1, where layer 0 need not be loaded.
    """

    def stepped(steps: int) -> float:
        return min(1.0, min_ratio + steps * RATIO_STEP)

    low, high = 0, math.ceil((1 - min_ratio) / RATIO_STEP)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _hides(at(stepped(middle)), least) else (low, middle - 1)
    return stepped(low)


def _hides(more: Forecast, least: Forecast) -> bool:
    """Whether ``more`` recompute costs no time over the least."""
    longer = more.ttft_s - least.ttft_s - TIME_ROUNDING * least.ttft_s
    shown = (1 - HIDDEN_SHARE) * (more.compute_s - least.compute_s)
    return longer <= HIDDEN_SLACK * least.ttft_s and longer <= shown
