"""Matches in a prompt, and those that do not overlap."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Match:
    """A chunk's text at ``prompt[start:end]``.

    ``complete`` is False where the chunk's tail is cut off: then ``prompt[start:end]`` is a proper
    prefix of the chunk's text.
    """

    chunk_id: str
    start: int
    end: int
    complete: bool


class Spans:
    """Matches that do not overlap, kept sorted by start."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._matches: list[Match] = []

    def free(self, start: int, end: int) -> bool:
        return self.room(start, end) == end - start

    def room(self, start: int, limit: int) -> int:
        """Characters from ``start`` to the next match or ``limit``, 0 inside a match."""
        at = bisect.bisect_right(self._starts, start)
        if at and self._matches[at - 1].end > start:
            return 0
        return min(limit, self._starts[at] if at < len(self._starts) else limit) - start

    def add(self, match: Match) -> None:
        at = bisect.bisect_right(self._starts, match.start)
        self._starts.insert(at, match.start)
        self._matches.insert(at, match)

    def matches(self) -> list[Match]:
        return self._matches


def best_cover(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Indices of disjoint spans that cover most together; of equal covers, that of fewest spans.

    Weighted interval scheduling: O(n log n).
    """
    order = sorted(range(len(spans)), key=lambda i: (spans[i][1], spans[i][0]))
    ends = [spans[i][1] for i in order]
    scores, before = [0], []  # of the first k spans
    scale = len(spans) + 1  # a character counts for more than all spans
    for k, i in enumerate(order):
        start, end = spans[i]
        before.append(bisect.bisect_right(ends, start, 0, k))
        scores.append(max(scores[k], scores[before[k]] + (end - start) * scale - 1))
    chosen, k = [], len(order)
    while k:
        if scores[k] == scores[k - 1]:
            k -= 1
        else:
            chosen.append(order[k - 1])
            k = before[k - 1]
    return chosen[::-1]


def matched_chars(matches: Sequence[Match]) -> int:
    return sum(match.end - match.start for match in matches)


def common_prefix(prompt: str, start: int, limit: int, text: str) -> int:
    """Characters that ``prompt[start:limit]`` and ``text`` have in common from their starts."""
    low, high = 0, min(limit - start, len(text))
    while low < high:
        middle = (low + high + 1) // 2
        if prompt.startswith(text[low:middle], start + low):
            low = middle
        else:
            high = middle - 1
    return low
