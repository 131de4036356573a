"""Looking for the schedule with the smallest deviation at a given ratio.

Knows no model: ``measure`` says how far a schedule's outputs are from full prefill. A schedule is a
mixture of the vertices ``first:1`` … ``first:L-1`` (every non-increasing vector is one), so a move takes
mass from where it is and gives it to a vertex, or takes a vertex's mass away, and the ratio stays.
Starts from the best of the fixed families and keeps the best of all that was tried.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from blendrag.fusor.selection import Schedule

Shares = tuple[float, ...]
#: ``measure(schedule, bound)`` → mean deviation, or infinity once that is certain to pass ``bound``.
Measure = Callable[[Schedule, float], float]

GROWTHS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.25)
#: Layers after which a family or a move may stop spending.
STOPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80)
#: Parts of the whole mass that a move gives to a vertex, largest first.
PARTS = (0.5, 0.2, 0.08, 0.03)
#: A move counts if it saves at least this share of the deviation.
WORTHWHILE = 2e-3
MAX_ROUNDS = 6


@dataclass(frozen=True)
class Tried:
    """A schedule and the mean deviation it was measured at."""

    schedule: Schedule
    deviation: float


@dataclass(frozen=True)
class Step:
    """How far a search is: told after every schedule measured."""

    tried: int
    family: Tried
    """Best of the fixed families so far."""
    best: Tried


@dataclass
class Found:
    """What a search came to; ``best`` is never worse than any of ``families``."""

    families: list[Tried] = field(default_factory=list)
    best: Tried | None = None
    tried: int = 0
    interrupted: bool = False
    out_of_time: bool = False

    @property
    def family(self) -> Tried:
        """The best of the fixed families."""
        return min(self.families, key=lambda each: each.deviation)


def families(layers: int) -> list[Schedule]:
    """The fixed shapes a search begins with: constant, linear, geometric, first:m."""
    names = ["constant", "linear", *(f"geometric:{g:g}" for g in GROWTHS)]
    names += [f"first:{m}" for m in STOPS if m < layers - 1]
    return [Schedule.parse(name) for name in names]


def search(
    measure: Measure,
    layers: int,
    ratio: float,
    seed: int = 0,
    has_time: Callable[[], bool] = lambda: True,
    watch: Callable[[Step], None] = lambda step: None,
    known: Schedule | None = None,
) -> Found:
    """The best schedule for a model of ``layers`` at ``ratio``; the same for the same arguments.

    ``known`` is what an earlier search found: it is tried first, so that nothing worse replaces it. Ends
    early when ``has_time()`` says so or at ``KeyboardInterrupt``, with the best so far; before the first
    family is measured the interrupt is raised.
    """
    found = Found()
    try:
        if known is not None:
            found.tried, found.best = 1, Tried(known, measure(known, math.inf))
        _try_families(found, measure, layers, ratio, has_time, watch)
        _refine(found, measure, layers, ratio, random.Random(seed), has_time, watch)
    except KeyboardInterrupt:
        if not found.families:
            raise
        found.interrupted = True
    assert found.best is not None
    assert found.best.deviation <= found.family.deviation, "the best of all tried is kept"
    return found


def _try_families(
    found: Found,
    measure: Measure,
    layers: int,
    ratio: float,
    has_time: Callable[[], bool],
    watch: Callable[[Step], None],
) -> None:
    seen: set[Shares] = set()
    for schedule in families(layers):
        shares = tuple(round(share, 9) for share in schedule.shares(ratio, layers))
        if shares in seen:  # at high ratios the cap makes one of several
            continue
        if found.families and not has_time():
            found.out_of_time = True
            return
        seen.add(shares)
        tried = Tried(schedule, measure(schedule, math.inf))
        _keep(found, tried)  # first: Ctrl-C in between leaves no family better than the best
        found.families.append(tried)
        _tell(found, watch)


def _refine(
    found: Found,
    measure: Measure,
    layers: int,
    ratio: float,
    rng: random.Random,
    has_time: Callable[[], bool],
    watch: Callable[[Step], None],
) -> None:
    for _ in range(MAX_ROUNDS):
        improved = False
        for move in _shuffled_moves(layers - 1, rng):
            assert found.best is not None
            if not has_time():
                found.out_of_time = True
                return
            shares = _moved(found.best.schedule.shares(ratio, layers), move, ratio)
            if shares is None:
                continue
            bound = (1 - WORTHWHILE) * found.best.deviation
            schedule = Schedule("vector", shares)
            tried = Tried(schedule, measure(schedule, bound))
            improved |= tried.deviation < bound
            _keep(found, tried)
            _tell(found, watch)
        if not improved:
            return


def _keep(found: Found, tried: Tried) -> None:
    found.tried += 1
    if found.best is None or tried.deviation < found.best.deviation:
        found.best = tried


def _tell(found: Found, watch: Callable[[Step], None]) -> None:
    assert found.best is not None
    watch(Step(found.tried, found.family, found.best))


@dataclass(frozen=True)
class _Move:
    """Give vertex ``first:stop`` the ``part`` of the whole mass; below 0: take that part of its own."""

    stop: int
    part: float


def _shuffled_moves(n: int, rng: random.Random) -> Iterator[_Move]:
    """Large steps first, each size in random order; none where there is but one vertex."""
    if n < 2:
        return
    stops = [*(m for m in STOPS if m < n), n]
    for part in PARTS:
        moves = [_Move(m, part) for m in stops]
        moves += [_Move(m, -2 * part) for m in stops]  # -1: all of what it has
        rng.shuffle(moves)
        yield from moves


def _moved(shares: Sequence[float], move: _Move, ratio: float) -> Shares | None:
    """``shares`` after ``move``, with the same mean; ``None`` where it is impossible or changes nothing."""
    n = len(shares)
    total = ratio * n
    vertex = [total / move.stop if i < move.stop else 0.0 for i in range(n)]
    part = move.part
    if part < 0:
        below = shares[move.stop] if move.stop < n else 0.0
        own = (shares[move.stop - 1] - below) * move.stop / total  # the vertex's part of the mass
        if own < 1e-3 or own > 1 - 1e-3:
            return None
        taken = -part * own
        part = -taken / (1 - taken)
    mixed = tuple((1 - part) * s + part * v for s, v in zip(shares, vertex, strict=True))
    if mixed[0] > 1.0 or max(abs(a - b) for a, b in zip(mixed, shares, strict=True)) < 1e-6:
        return None
    return tuple(max(0.0, share) for share in mixed)
