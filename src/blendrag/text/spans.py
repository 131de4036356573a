"""Spans of a text, as pairs of character positions: merge, subtract and compare them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

Span = tuple[int, int]


def merged(spans: Sequence[Span]) -> list[Span]:
    """The same characters as ascending, disjoint spans."""
    made: list[Span] = []
    for low, high in sorted(spans):
        if made and low < made[-1][1]:
            made[-1] = (made[-1][0], max(high, made[-1][1]))
        else:
            made.append((low, high))
    return made


def gaps(spans: Sequence[Span], size: int) -> list[Span]:
    """What is between ``spans`` in a text of ``size`` characters."""
    edges = [0, *(edge for span in spans for edge in span), size]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(low, high) for low, high in pairs if low < high]


def without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """``spans`` without the characters of ``holes``; both are ascending and disjoint."""
    left = []
    for low, high in spans:
        for start, end in holes[bisect_right(holes, low, key=lambda hole: hole[1]) :]:
            if start >= high:
                break
            left.append((low, start))
            low = end
        left.append((low, high))
    return [(low, high) for low, high in left if low < high]


def overlapping(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Those of ``spans`` that share a character with one of ``others``, which are ascending and disjoint."""
    found = []
    for span in spans:
        at = bisect_right(others, span[0], key=lambda other: other[1])
        if at < len(others) and others[at][0] < span[1]:
            found.append(span)
    return found
