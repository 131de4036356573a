"""Loads that overlap computing: when each layer is there, and when it is done.

Three workers, each busy with one layer at a time and in order: reading, copying to the device, computing.
A layer's copy begins when it was read and the copy before is done; its compute when it was copied and the
layer before is computed (max-plus). Where computing is on the host there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def arrivals(reads: Sequence[float], copies: Sequence[float] = ()) -> list[float]:
    """When each layer's stored KV is in place, from the start."""
    read = list(accumulate(reads))
    if not copies:
        return read
    there: list[float] = []
    for done, copy in zip(read, copies, strict=True):
        there.append(max(done, there[-1] if there else 0.0) + copy)
    return there


def finish(arrived: Sequence[float], computes: Sequence[float]) -> float:
    """When the last layer is computed."""
    done = 0.0
    for there, compute in zip(arrived, computes, strict=True):
        done = max(done, there) + compute
    return done


def hidden_extra(
    arrived: Sequence[float], computes: Sequence[float], bound: float, first: int = 0
) -> list[float]:
    """The most seconds that may be added to the layers ``first``… so that all still finish by ``bound``,
    none getting more than the layer before.

    Behind layer l's arrival there is time for the layers l… only, so the sum of what is added to them is
    at most what is left of ``bound`` there; sums of a sequence that does not rise, taken from the end, are
    convex; so the most they can be is the lower convex hull of those bounds. Zeros where ``computes``
    alone do not finish in time.
    """
    layers = len(computes)
    room = [0.0] * (layers + 1)
    behind = 0.0
    for layer in reversed(range(layers)):
        behind += computes[layer]
        room[layer] = bound - arrived[layer] - behind
    room = room[first:]
    if min(room) < 0:
        return [0.0] * (layers - first)
    corners: list[int] = []
    for at in range(len(room)):
        while len(corners) > 1 and _is_above(room, corners[-2], corners[-1], at):
            corners.pop()
        corners.append(at)
    extra: list[float] = []
    for a, b in pairwise(corners):
        extra += [max(0.0, (room[a] - room[b]) / (b - a))] * (b - a)
    return extra


def _is_above(room: Sequence[float], a: int, middle: int, b: int) -> bool:
    """Whether the bound at ``middle`` lies on or above the line between those at ``a`` and ``b``."""
    return (room[middle] - room[a]) * (b - a) >= (room[b] - room[a]) * (middle - a)
