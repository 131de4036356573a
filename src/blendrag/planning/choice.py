"""The ratio, and what to compute instead of loading: the loading controller's decisions.

CacheBlend §5.1 takes the larger of two ratios: the one whose recompute just hides behind the load, and the
smallest that keeps quality. So here, with one thing on top. A stored chunk may be computed afresh where
waiting for it would take longer; that is decided first, at the smallest ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blendrag.planning.forecast import Estimator, Forecast, Prompt
from blendrag.planning.parts import Loaded, Part
from blendrag.planning.profile import Profile

#: A prefill may take this much longer than at the smallest ratio, and the recompute still counts as hidden:
#: estimates are no better, and the last layer's is never behind any load.
HIDDEN_SLACK = 0.03
#: Of the compute that a larger ratio adds, this share must hide: what merely fits the slack is no gain.
HIDDEN_SHARE = 0.5
#: Computing what could be loaded must make the prompt faster by this share: estimates are no better.
WORTH = 0.1
#: Steps in which ratios are tried.
STEP = 0.01
HIDDEN = "the largest whose recompute hides behind the load"
FREE = "the largest that is computed in no more time than the smallest"


@dataclass(frozen=True)
class Wish:
    """What a caller leaves open, and what not."""

    min_ratio: float
    """The smallest that keeps quality."""
    counts: Callable[[float, int, int], Sequence[float]]
    """Tokens recomputed in layers 1…L-1 at a ratio, of so many candidates in so many chunks."""
    is_budgeted: bool = True
    """Whether the policy spends the budget it is given; otherwise the ratio decides nothing."""

    def counts_at(self, ratio: float, estimator: Estimator) -> Sequence[float]:
        """Of what is loaded there."""
        return self.counts(ratio, estimator.candidates, estimator.chunks)


@dataclass(frozen=True)
class Choice:
    """What to do. ``loaded`` are indices into the prompt's parts."""

    loaded: tuple[int, ...]
    ratio: float
    forecast: Forecast
    load_all_s: float
    """Predicted time to first token with everything loaded, at the smallest ratio."""
    reason: str
    waits: bool = True
    """Whether everything loaded would be waited for; if not, what is computed costs more to blend."""


def choose(profile: Profile, prompt: Prompt, wish: Wish) -> Choice:
    """The fastest set of parts to load, then the largest ratio that costs nothing over it.

    Raises :class:`KeyError` for a part in a tier that was not measured.
    """
    loaded, load_all_s, waits = _what_to_load(profile, prompt, wish)
    estimator = Estimator(profile, prompt, [prompt.parts[i] for i in loaded])
    at_least = estimator.at(wish.counts_at(wish.min_ratio, estimator))
    kept = Choice(loaded, wish.min_ratio, at_least, load_all_s, _kept(wish, estimator), waits)
    if not estimator.candidates or not wish.is_budgeted:
        return kept
    limit = _Limit(at_least)
    ratio = _largest_ratio(estimator, wish, limit)
    if ratio <= wish.min_ratio:
        return kept
    more = estimator.at(wish.counts_at(ratio, estimator))
    reason = f"ratio {ratio:.2f}: {FREE if limit.is_free(more) else HIDDEN}"
    return replace(kept, ratio=ratio, forecast=more, reason=reason)


def _kept(wish: Wish, estimator: Estimator) -> str:
    if not estimator.candidates:
        return "nothing is loaded that could be recomputed"
    if not wish.is_budgeted:
        return "the policy recomputes what it recomputes, whatever the ratio"
    return f"ratio {wish.min_ratio:.2f}: the smallest that keeps quality; more would not hide behind the load"


# -- load or compute ------------------------------------------------------------------------------


def _what_to_load(
    profile: Profile, prompt: Prompt, wish: Wish
) -> tuple[tuple[int, ...], float, bool]:
    """Indices to load, the time with all of them, and whether they would be waited for.

    Parts are given up one after the other, those first whose loading takes longest for a token, and the
    best of these sets is taken: exact for parts of one length, whatever tiers they lie in. For others it is
    mended by the best change of one part. Each set's sums are those of another and one part more or less.
    """
    parts = prompt.parts

    def seconds(loaded: Loaded) -> float:
        estimator = Estimator(profile, prompt, loaded)
        return estimator.at(wish.counts_at(wish.min_ratio, estimator)).ttft_s

    every = frozenset(range(len(parts)))
    sets = {every: Loaded.of(profile, parts), frozenset[int](): Loaded.of(profile, ())}
    # A part that nobody waits for is not worth computing by itself.
    waits = _waits(Estimator(profile, prompt, sets[every]), wish)
    ones = [Loaded.of(profile, [part]) for part in parts] if waits else []
    if waits:
        sets = _given_up_in_turn(profile, parts, ones)
    times = {chosen: seconds(loaded) for chosen, loaded in sets.items()}
    if waits and len({part.tokens for part in parts}) > 1:
        fastest = min(times, key=times.__getitem__)
        changed = _changed_in_one(fastest, sets[fastest], ones)
        times |= {chosen: seconds(loaded) for chosen, loaded in changed.items()}
    best_set = min(times, key=times.__getitem__)
    is_worth = times[best_set] <= (1 - WORTH) * times[every]
    return tuple(sorted(best_set if is_worth else every)), times[every], waits


def _given_up_in_turn(
    profile: Profile, parts: Sequence[Part], ones: Sequence[Loaded]
) -> dict[frozenset[int], Loaded]:
    """Sets of some of ``parts``, the largest first."""
    slowest = sorted(range(len(parts)), key=lambda i: -_load_s(profile, parts[i]) / parts[i].tokens)
    sets = {frozenset[int](): Loaded.of(profile, ())}
    for i in reversed(slowest):  # from none on: sums of few parts without the rounding of many
        chosen, loaded = next(reversed(sets.items()))
        sets[chosen | {i}] = loaded.plus(ones[i])
    return dict(reversed(sets.items()))


def _changed_in_one(
    chosen: frozenset[int], loaded: Loaded, ones: Sequence[Loaded]
) -> dict[frozenset[int], Loaded]:
    """The sets that differ from ``chosen`` in one part."""
    return {
        chosen ^ {i}: loaded.minus(one) if i in chosen else loaded.plus(one)
        for i, one in enumerate(ones)
    }


def _waits(everything: Estimator, wish: Wish) -> bool:
    """Whether loads that took no time would make the prompt faster by as much as is worth it."""
    counts = wish.counts_at(wish.min_ratio, everything)
    return everything.waiting_s(counts) > WORTH * everything.at(counts).ttft_s


def _load_s(profile: Profile, part: Part) -> float:
    tier = profile.tier(part.tier)
    if tier is None:
        raise KeyError(part.tier)
    return tier.seconds(sum(part.layer_bytes), len(part.layer_bytes))


# -- how much -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Limit:
    """What may be added to a prefill at the smallest ratio."""

    least: Forecast

    @property
    def bound_s(self) -> float:
        return (1 + HIDDEN_SLACK) * self.least.ttft_s

    @property
    def rounding_s(self) -> float:
        return 1e-9 * self.bound_s

    def allows(self, more: Forecast) -> bool:
        longer = more.ttft_s - self.least.ttft_s
        in_time = more.ttft_s <= self.bound_s + self.rounding_s
        return in_time and longer <= (1 - HIDDEN_SHARE) * self._added_s(more) + self.rounding_s

    def is_free(self, more: Forecast) -> bool:
        """Whether there is nothing to hide: few rows take as long as many, as on a GPU."""
        return self._added_s(more) <= 2 * self.rounding_s

    def _added_s(self, more: Forecast) -> float:
        return more.compute_s - self.least.compute_s


def _largest_ratio(estimator: Estimator, wish: Wish, limit: _Limit) -> float:
    """The largest ratio, in steps, that costs no time; the smallest one is known to.

    The more, the longer: but for a ratio of 1, where layer 0 need not be loaded, and nothing that is loaded
    is of use. It is taken where what is just below it costs nothing either.
    """
    low, high = 0, math.ceil((1 - wish.min_ratio) / STEP)
    while low < high:
        middle = (low + high + 1) // 2
        fits = limit.allows(estimator.at(wish.counts_at(_stepped(wish, middle), estimator)))
        low, high = (middle, high) if fits else (low, middle - 1)
    return _stepped(wish, low)


def _stepped(wish: Wish, steps: int) -> float:
    return min(1.0, wish.min_ratio + steps * STEP)
