"""The simulation: requests arrive at random, a router chooses a replica, the replica answers in order.

A replica computes one prefill at a time, first come first served, so a request leaves at
``max(arrival, leaving of the one before) + service time`` (Lindley's recursion). That is exact and needs no
event loop. Chunks are promoted as in ``store/tiered.py``: what is read enters memory and disk, each use
counts in both, and each evicts the least recently used. The remote holds every chunk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil
from random import Random

import numpy as np

from blendrag_ray.routing import choose_replica
from lab.simulation.popularity import Demand

#: Requests drawn at a time, and between two reports of progress.
BLOCK = 2000
#: A hashed replica may have so many times the mean queue (Mirrokni, Thorup and Zadimoghaddam, 2018).
BOUND = 1.25

Route = Callable[[Sequence[int], "Queues"], int]
"""Chunks of a request and queues of all replicas → the index of a replica."""


@dataclass
class Queues:
    """The requests before a new one, of each replica."""

    lengths: list[int]
    free_s: list[float]
    """When a replica has answered them."""
    now_s: float = 0.0
    usual_s: float = 1.0
    """Mean time of a request."""

    def requests(self) -> list[float]:
        """How many requests a new one would wait for. Of the first one, the part that is left."""
        return [max(0.0, free_s - self.now_s) / self.usual_s for free_s in self.free_s]


class Lru:
    """The chunks in a tier, least recently used first."""

    def __init__(self, capacity: int, chunks: Sequence[int] = ()) -> None:
        self.capacity = capacity
        self.chunks: OrderedDict[int, None] = OrderedDict.fromkeys(
            chunks[-capacity:] if capacity else ()
        )

    def use(self, chunk: int) -> bool:
        """Whether ``chunk`` was there. It is now, as the most recently used one."""
        if chunk in self.chunks:
            self.chunks.move_to_end(chunk)
            return True
        self.chunks[chunk] = None
        return False

    def evict(self) -> list[int]:
        """What no longer fits."""
        over = len(self.chunks) - self.capacity
        return [self.chunks.popitem(last=False)[0] for _ in range(over)]


class Residency:
    """How many chunks of a request each replica has on disk.

    A chunk's replicas are the bytes of one integer, so that sums over chunks count for all replicas at once.
    """

    def __init__(self, held: Sequence[Sequence[int]]) -> None:
        self._replicas = len(held)
        self._places: dict[int, int] = {}
        for replica, chunks in enumerate(held):
            self.change(replica, chunks, ())

    def change(self, replica: int, added: Sequence[int], evicted: Sequence[int]) -> None:
        one = 1 << (8 * replica)
        for chunk in added:
            self._places[chunk] = self._places.get(chunk, 0) + one
        for chunk in evicted:
            left = self._places.pop(chunk) - one
            if left:
                self._places[chunk] = left

    def counts(self, chunks: Sequence[int]) -> bytes:
        """For each replica the number of ``chunks``, at most 255, on its disk."""
        places = sum(self._places.get(chunk, 0) for chunk in chunks)
        return places.to_bytes(self._replicas, "little")


@dataclass(frozen=True)
class SimulatedCluster:
    """Replicas that are alike, and what their requests ask for."""

    replicas: int
    demand: Demand
    memory_chunks: int
    disk_chunks: int
    """At least ``memory_chunks``: what is in memory is on disk, too."""
    service_s: Mapping[tuple[int, int], float]
    """By the number of chunks in memory and of those that are on disk only."""
    requests_per_s: float
    """Arrivals at all replicas together, at exponential intervals."""
    queued_chunks: float
    """What a queued request is worth to the routing ``affinity``, in chunks that need not be read."""


@dataclass(frozen=True)
class Simulated:
    """What was simulated of the requests that count, in the order of their arrival."""

    ttft_s: Sequence[float]
    memory: Sequence[int]
    """Chunks of each that were in memory."""
    disk: Sequence[int]
    """Chunks of each that were on disk only."""
    busy: Sequence[float]
    """Share of the time in which each replica computed."""
    seconds: float
    """Between the first and the last arrival."""
    replaced: float
    """Chunks that left the disks before requests counted, as a share of the disks."""


# -- routing --------------------------------------------------------------------------------------


def _random(cluster: SimulatedCluster, known: Residency, random: Random) -> Route:
    return lambda chunks, queues: random.randrange(cluster.replicas)


def _round_robin(cluster: SimulatedCluster, known: Residency, random: Random) -> Route:
    last = -1

    def choose(chunks: Sequence[int], queues: Queues) -> int:
        nonlocal last
        last = (last + 1) % cluster.replicas
        return last

    return choose


def _power_of_two(cluster: SimulatedCluster, known: Residency, random: Random) -> Route:
    def choose(chunks: Sequence[int], queues: Queues) -> int:
        drawn = random.sample(range(cluster.replicas), min(2, cluster.replicas))
        return min(drawn, key=queues.lengths.__getitem__)

    return choose


def _hash(cluster: SimulatedCluster, known: Residency, random: Random) -> Route:
    """Consistent hashing of the first chunk with bounded loads; the ring is a random order for each chunk."""
    count = cluster.replicas

    def choose(chunks: Sequence[int], queues: Queues) -> int:
        limit = ceil(BOUND * (sum(queues.lengths) + 1) / count)
        ring = Random(chunks[0])
        for _ in range(8 * count):
            if queues.lengths[replica := ring.randrange(count)] < limit:
                return replica
        return min(range(count), key=queues.lengths.__getitem__)

    return choose


def _affinity(cluster: SimulatedCluster, known: Residency, random: Random) -> Route:
    """By the score of Ray Serve's router. All chunks have the same size, so they are counted in its place.

    The router knows what it sent: chunks count as resident from the moment their request is routed.
    """
    return lambda chunks, queues: choose_replica(
        known.counts(chunks), queues.requests(), cluster.queued_chunks, random
    )


ROUTING: dict[str, Callable[[SimulatedCluster, Residency, Random], Route]] = {
    "random": _random,
    "round-robin": _round_robin,
    "power-of-two": _power_of_two,
    "hash": _hash,
    "affinity": _affinity,
}


# -- the run --------------------------------------------------------------------------------------


def simulate(
    cluster: SimulatedCluster,
    routing: str,
    requests: int,
    warm_requests: int,
    seed: int = 0,
    watch: Callable[[int], None] = lambda done: None,
) -> Simulated:
    """``requests`` requests after ``warm_requests`` that do not count.

    Tiers begin as routing at random would fill them in endless time: with what :meth:`Demand.recent` draws
    for each replica. For routing that looks at chunks, ``warm_requests`` bring them to their own state.
    """
    rng, random = np.random.default_rng(seed), Random(seed)
    held = [cluster.demand.recent(cluster.disk_chunks, rng) for _ in range(cluster.replicas)]
    memory = [Lru(cluster.memory_chunks, chunks) for chunks in held]
    disk = [Lru(cluster.disk_chunks, chunks) for chunks in held]
    known = Residency(held if routing == "affinity" else [()] * cluster.replicas)
    route = ROUTING[routing](cluster, known, random)
    del held

    queues = Queues([0] * cluster.replicas, [0.0] * cluster.replicas)
    free_s = queues.free_s
    leaving: list[tuple[float, int]] = []
    busy_s = [0.0] * cluster.replicas
    ttft_s: list[float] = []
    in_memory: list[int] = []
    on_disk: list[int] = []
    began_s = now_s = 0.0
    left = 0
    arrivals = _arrivals(cluster, warm_requests + requests, rng, watch)
    for number, (now_s, chunks) in enumerate(arrivals):
        while leaving and leaving[0][0] <= now_s:
            queues.lengths[heappop(leaving)[1]] -= 1
        queues.now_s = now_s
        replica = route(chunks, queues)
        hits = [memory[replica].use(chunk) for chunk in chunks]
        there = [disk[replica].use(chunk) for chunk in chunks]
        memory[replica].evict()
        evicted = disk[replica].evict()
        if routing == "affinity":
            added = [chunk for chunk, found in zip(chunks, there, strict=True) if not found]
            known.change(replica, added, evicted)
        m, d = sum(hits), sum(there) - sum(hits)
        service_s = cluster.service_s[m, d]
        free_s[replica] = max(now_s, free_s[replica]) + service_s
        queues.lengths[replica] += 1
        queues.usual_s += (service_s - queues.usual_s) / (number + 1)
        heappush(leaving, (free_s[replica], replica))
        if number < warm_requests:
            left += len(evicted)
        elif number == warm_requests:
            began_s = now_s
        if number >= warm_requests:
            ttft_s.append(free_s[replica] - now_s)
            in_memory.append(m)
            on_disk.append(d)
            busy_s[replica] += service_s
    seconds = now_s - began_s
    busy = [each / seconds for each in busy_s]
    replaced = left / (cluster.replicas * cluster.disk_chunks)
    return Simulated(ttft_s, in_memory, on_disk, busy, seconds, replaced)


def _arrivals(
    cluster: SimulatedCluster, count: int, rng: np.random.Generator, watch: Callable[[int], None]
) -> Iterator[tuple[float, list[int]]]:
    """When each request arrives, and its chunks."""
    now_s = 0.0
    for done in range(0, count, BLOCK):
        watch(done)
        size = min(BLOCK, count - done)
        times = now_s + rng.exponential(1 / cluster.requests_per_s, size).cumsum()
        now_s = float(times[-1])
        yield from zip(times.tolist(), cluster.demand.draw(size, rng).tolist(), strict=True)
