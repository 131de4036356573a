"""Which replica answers a request: many of its chunks are there, and few requests wait.

Without Ray, so that the router of Ray Serve and the simulation of the lab call the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

#: A usual price of a queued request: this share of the bytes of the request's own chunks. A request whose KV
#: is all in one place waits there for up to two fifths of a usual prefill. In simulations, higher prices read
#: more from the remote and lower ones wait longer.
QUEUED_SHARE = 2.5


def choose_replica(
    resident_bytes: Sequence[float], queues: Sequence[float], queued_bytes: float, random: Random
) -> int:
    """The index of the replica with the highest score: the bytes that it need not read from the remote, minus
    a price for each request before this one. Of equals, the least busy one, or one at random.

    ``queues``: requests that wait or run there; parts of one count as parts. ``queued_bytes``: the price; see
    :data:`QUEUED_SHARE`.
    """
    ranks = [
        (resident - queue * queued_bytes, -queue)
        for resident, queue in zip(resident_bytes, queues, strict=True)
    ]
    best = max(ranks)
    return random.choice([i for i, each in enumerate(ranks) if each == best])
