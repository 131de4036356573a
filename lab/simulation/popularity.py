"""Which chunks requests ask for, drawn without a table of the corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

#: References drawn to fill a cache, at most, per chunk that it holds. What is not among them is asked for so
#: rarely that it makes no difference.
HISTORY = 32


@dataclass(frozen=True)
class Zipf:
    """Numbers 0…n-1 with probabilities proportional to 1/(rank+1)^s.

    Rejection-inversion (Hörmann and Derflinger, 1996) on arrays: no table, so n may be 10⁸ and more.
    """

    n: int
    s: float

    def draw(self, size: int, rng: np.random.Generator) -> Ids:
        low, high = self._area(np.array([1.5, self.n + 0.5])) - (1.0, 0.0)
        found = np.empty(size, dtype=np.int64)
        missing = np.arange(size)
        while missing.size:
            area = rng.uniform(low, high, missing.size)
            rank = np.clip(np.rint(self._rank(area)), 1, self.n)
            fits = area >= self._area(rank + 0.5) - rank**-self.s
            found[missing[fits]] = rank[fits].astype(np.int64) - 1
            missing = missing[~fits]
        return found

    def _area(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """The integral of x^-s from 1 to ``x``."""
        return np.log(x) if self.s == 1 else (x ** (1 - self.s) - 1) / (1 - self.s)

    def _rank(self, area: NDArray[np.float64]) -> NDArray[np.float64]:
        """The inverse of :meth:`_area`."""
        if self.s == 1:
            return np.exp(area)
        return np.maximum(1 + (1 - self.s) * area, 0) ** (1 / (1 - self.s))


@dataclass(frozen=True)
class Demand:
    """Requests for ``top_k`` different chunks out of ``chunks``.

    A topic is a run of ``topic_chunks`` chunks. A request draws one by Zipf's law and takes its chunks from
    it; with topics of one chunk it draws each chunk by Zipf's law.
    """

    chunks: int
    zipf: float
    top_k: int
    topic_chunks: int = 1

    def draw(self, requests: int, rng: np.random.Generator) -> Ids:
        """The chunks of each request: ``[requests, top_k]``."""
        if self.topic_chunks > 1:
            topics = Zipf(self.chunks // self.topic_chunks, self.zipf).draw(requests, rng)
            order = rng.random((requests, self.topic_chunks)).argsort(axis=1)
            return topics[:, None] * self.topic_chunks + order[:, : self.top_k]
        law = Zipf(self.chunks, self.zipf)
        drawn = law.draw(requests * self.top_k, rng).reshape(requests, self.top_k)
        for column in range(1, self.top_k):  # again while it is one of the columns before
            twice = np.arange(requests)
            while twice.size:
                there = drawn[twice, :column] == drawn[twice, column, None]
                twice = twice[there.any(axis=1)]
                drawn[twice, column] = law.draw(twice.size, rng)
        return drawn

    def recent(self, capacity: int, rng: np.random.Generator) -> list[int]:
        """What an LRU cache holds after endless requests, least recently used first.

        These are the last ``capacity`` different chunks of a random history. It is drawn backwards, from the
        latest request on, so nothing older is drawn.
        """
        if capacity >= self.chunks:
            return cast(list[int], rng.permutation(self.chunks).tolist())
        history = np.empty(0, dtype=np.int64)  # latest first
        latest = history
        while latest.size < capacity and history.size < HISTORY * capacity:
            more = self.draw(max(64, capacity // self.top_k), rng)
            history = np.concatenate([history, more.ravel()])
            latest = np.sort(np.unique(history, return_index=True)[1])
        return cast(list[int], history[latest[:capacity]][::-1].tolist())
