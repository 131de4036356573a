"""What a queue before one model does at any request rate, computed from the times that requests take.

Requests arrive when they arrive (open loop, exponential gaps), wait for those before them, and take what
they took. The queue is computed, not waited for: with one worker that answers in order the two are the
same, and every rate is judged by the same measurements.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np

from blendrag.lab.bench.load_servers import Served

#: Arrivals in a computed queue; the requests measured are repeated in their order.
ARRIVALS = 2000


class Queue:
    """One worker that answers in order, and the times its requests take."""

    def __init__(self, served: Sequence[Served], seed: int = 0) -> None:
        self._served = list(islice(cycle(served), ARRIVALS))
        self._gaps = np.random.default_rng(seed).exponential(size=ARRIVALS)
        self.alone_s = statistics.fmean(s.first_s for s in served)

    def at(self, rate: float) -> tuple[list[float], float]:
        """Seconds from arrival to first token of every request at ``rate`` a second; and the throughput."""
        arrived = free = 0.0
        found = []
        for gap, served in zip(self._gaps, self._served, strict=True):
            arrived += gap / rate
            free = max(arrived, free) + served.first_s
            found.append(free - arrived)
        return found, len(found) / free

    def mean(self, rate: float) -> float:
        return statistics.fmean(self.at(rate)[0])

    def rate_of(self, ttft_s: float) -> float:
        """The largest rate at which the mean TTFT is at most that; 0 where no rate is slow enough."""
        if self.alone_s > ttft_s:
            return 0.0
        low, high = 0.0, 4.0 / self.alone_s
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.mean(middle) <= ttft_s else (low, middle)
        return low
