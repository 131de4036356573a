"""Loads that overlap computing: when each layer is there, and when it is done.

Three workers, each busy with one layer at a time and in order: reading, copying to the device, computing.
A layer's copy begins when it was read and the copy before is done; its compute when it was copied and the
layer before is computed (max-plus). Where computing is on the host there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


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
