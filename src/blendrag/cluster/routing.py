"""Which replica answers a request: many of its chunks are there, and few requests wait.

Without Ray, so that the router of Ray Serve and the simulation of the lab call the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

#: A usual price of a queued request: this share of the bytes of the request's own chunks. In simulations,
#: higher prices read more from the remote and lower ones wait longer.
QUEUED_SHARE = 0.25


def score(resident_bytes: float, queue: float, queued_bytes: float) -> float:
    """The bytes that a replica need not read from the remote, minus a price for each request before this one.

    ``queue``: requests that wait or run there. ``queued_bytes``: the price; see :data:`QUEUED_SHARE`.
    """
    return resident_bytes - queue * queued_bytes


def choose_replica(
    resident_bytes: Sequence[float], queues: Sequence[float], queued_bytes: float, random: Random
) -> int:
    """The index of the replica with the highest score; of equals, one at random.

    If no replica has any of the request's chunks, the shorter of two random queues (power of two choices).
    """
    if not any(resident_bytes):
        return power_of_two(queues, random)
    scores = [
        score(there, queue, queued_bytes)
        for there, queue in zip(resident_bytes, queues, strict=True)
    ]
    best = max(scores)
    return random.choice([i for i, each in enumerate(scores) if each == best])


def power_of_two(queues: Sequence[float], random: Random) -> int:
    """The index of the shorter of two random queues; the first drawn of equals."""
    drawn = random.sample(range(len(queues)), min(2, len(queues)))
    return min(drawn, key=queues.__getitem__)
