"""Ways of doing one thing, measured in turn: who begins moves on by one every round.

Owns the clock and the statistics. What a way does is its own business, and so is that it did it: what
:meth:`Way.check` finds missing ends the benchmark, as a way that does nothing is always the fastest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blendrag.errors import BlendragError

Tick = Callable[[str], None]


class MeasuredNothingError(BlendragError):
    """A way did not do what its time is reported for."""


@dataclass(frozen=True)
class Row:
    """One way over all rounds; ``ms`` is the median."""

    part: str
    """What is done: ``warm read``, ``cold read``, ``put``, ``miss``, ``decode``."""
    way: str
    ms: float
    low_ms: float
    high_ms: float
    size_bytes: int
    """Moved in one round."""
    speed: float | None
    """Against the yardstick of the part, 1.0 being as fast; the median of the rounds' ratios."""


class Way:
    """One way of doing what a part is about."""

    name: str
    size_bytes: int = 0

    def prepare(self) -> None:
        """What has to be there before, outside the time."""

    def run(self) -> None:
        """What is timed."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise :class:`MeasuredNothingError` unless ``run`` did it; outside the time."""

    def finish(self) -> None:
        """Give back what ``prepare`` took, whatever happened."""

    def seconds(self) -> float:
        """Run once, by the clock."""
        began = time.perf_counter()
        self.run()
        return time.perf_counter() - began


def measure(
    part: str,
    ways: Sequence[Way],
    rounds: int,
    tick: Tick,
    yardstick: str | None = None,
    warm_up: bool = True,
) -> list[Row]:
    """Every way in every round, after one that does not count. Speeds are against ``yardstick``."""
    samples: dict[str, list[float]] = {way.name: [] for way in ways}
    if warm_up:
        tick(f"{part}: warming up")
        for way in ways:
            _once(way)
    for number in range(rounds):
        tick(f"{part}: round {number + 1} of {rounds}")
        first = number % len(ways)
        for way in (*ways[first:], *ways[:first]):
            samples[way.name].append(_once(way))
    base = samples[yardstick] if yardstick is not None else None
    return [row(part, way.name, samples[way.name], way.size_bytes, base) for way in ways]


def row(
    part: str, way: str, samples: Sequence[float], size_bytes: int, base: Sequence[float] | None
) -> Row:
    """The row of some samples in seconds."""
    speed = None
    if base is not None:
        speed = statistics.median(b / s for b, s in zip(base, samples, strict=True))
    low, middle, high = min(samples), statistics.median(samples), max(samples)
    return Row(part, way, middle * 1e3, low * 1e3, high * 1e3, size_bytes, speed)


def _once(way: Way) -> float:
    try:
        way.prepare()
        seconds = way.seconds()
        way.check()
        return seconds
    finally:
        way.finish()
