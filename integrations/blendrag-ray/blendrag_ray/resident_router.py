"""The router of Ray Serve that sends a request where the KV of its chunks is.

Replicas report what they hold as digests: the first four bytes of each key (:func:`digest`). Between two
reports the router assumes that a replica keeps what it was sent. How busy replicas are it knows from the
ingress, which is in its process (:mod:`blendrag.serving.open_requests`).

Serve's request routers are alpha (Ray 2.60). No other module of this package uses their classes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from blendrag.serving.open_requests import OpenRequest, OpenRequests
from blendrag_ray.forwarding import WholeRequest
from blendrag_ray.routing import QUEUED_SHARE, choose_replica

#: A chunk on the node's disk counts this much of one in the replica's memory.
DISK_SCORE = 0.75
#: Seconds between two reports of a replica, and for which a request's chunks count as held without one.
REPORT_S, ASSUMED_S = 2.0, 6.0
#: Most chunks that are assumed, per replica.
MAX_ASSUMED = 1 << 14
#: Names of the digests in a report.
MEMORY, DISK = "memory", "disk"

Chunks = Mapping[str, int]
"""Tokens of each chunk of a request, by key (64 hex digits)."""


def digest(keys: Iterable[str]) -> bytes:
    """The first four bytes of each key, sorted: one in 4 × 10⁹ is taken for another."""
    return np.unique(np.array([int(key[:8], 16) for key in keys], "<u4")).tobytes()


def holds(digested: bytes, key: str) -> bool:
    heads, head = np.frombuffer(digested, "<u4"), np.uint32(int(key[:8], 16))
    at = int(np.searchsorted(heads, head))
    return at < len(heads) and bool(heads[at] == head)


class Assumed:
    """Keys that a replica probably holds since it was sent their chunks, until it reports."""

    def __init__(self) -> None:
        self._until: OrderedDict[str, float] = OrderedDict()

    def note(self, keys: Iterable[str], now: float) -> None:
        for key in keys:
            self._until[key] = now + ASSUMED_S
            self._until.move_to_end(key)
        while len(self._until) > MAX_ASSUMED:
            self._until.popitem(last=False)

    def holds(self, key: str, now: float) -> bool:
        return self._until.get(key, 0.0) > now


@dataclass(frozen=True)
class ReplicaLoad:
    """What a router knows of a replica."""

    queue: float = 0.0
    """Requests that a new one would wait for."""
    report: Mapping[str, bytes] = field(default_factory=dict)
    assumed: Assumed = field(default_factory=Assumed)

    def resident_tokens(self, chunks: Chunks, now: float) -> float:
        """Tokens whose KV need not be read from the remote; a token has the same bytes in every chunk."""
        return sum(tokens * self._score_of(key, now) for key, tokens in chunks.items())

    def _score_of(self, key: str, now: float) -> float:
        if self.assumed.holds(key, now) or holds(self.report.get(MEMORY, b""), key):
            return 1.0
        return DISK_SCORE if holds(self.report.get(DISK, b""), key) else 0.0


def chosen(
    loads: Sequence[ReplicaLoad],
    chunks: Chunks,
    now: float,
    random: Random,
    queued_share: float = QUEUED_SHARE,
) -> int:
    """The index of the replica for a request with these chunks.

    ``queued_share``: the price of a queued request, as a share of the request's own KV.
    """
    resident = [load.resident_tokens(chunks, now) for load in loads]
    queues = [load.queue for load in loads]
    return choose_replica(resident, queues, queued_share * sum(chunks.values()), random)


class ResidentRouter(RequestRouter):
    """Serve's interface to :func:`chosen`. Requests name their chunks in the keyword ``chunks``."""

    def initialize_state(self, queued_share: float = QUEUED_SHARE) -> None:
        self._queued_share = queued_share
        self._random = Random()
        self._assumed: dict[ReplicaID, Assumed] = {}
        self._requests: dict[ReplicaID, OpenRequests] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The chosen replica, then all others, in case it takes no more requests."""
        chunks, now = _chunks_of(pending_request), time.monotonic()
        loads = [
            ReplicaLoad(
                self._requests_of(replica.replica_id).ahead,
                replica.routing_stats or {},
                self._assumed_of(replica.replica_id),
            )
            for replica in candidate_replicas
        ]
        at = chosen(loads, chunks, now, self._random, self._queued_share)
        self._note_sent(pending_request, candidate_replicas[at].replica_id)
        others = candidate_replicas[:at] + candidate_replicas[at + 1 :]
        return [[candidate_replicas[at]], others]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._assumed_of(replica_id).note(_chunks_of(pending_request), time.monotonic())
        self._note_sent(pending_request, replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        for known in (self._assumed, self._requests):
            for gone in set(known) - {replica.replica_id for replica in replicas}:
                del known[gone]

    def _note_sent(self, pending_request: PendingRequest | None, replica_id: ReplicaID) -> None:
        """Count a request at one replica, and at no other where it was sent before."""
        progress = _progress_of(pending_request)
        if progress is None or progress in self._requests_of(replica_id):
            return
        for requests in self._requests.values():
            requests.discard(progress)
        self._requests_of(replica_id).open(progress)

    def _requests_of(self, replica_id: ReplicaID) -> OpenRequests:
        return self._requests.setdefault(replica_id, OpenRequests())

    def _assumed_of(self, replica_id: ReplicaID) -> Assumed:
        return self._assumed.setdefault(replica_id, Assumed())


def _chunks_of(pending_request: PendingRequest | None) -> Chunks:
    return pending_request.kwargs.get("chunks", {}) if pending_request is not None else {}


def _progress_of(pending_request: PendingRequest | None) -> OpenRequest | None:
    if pending_request is None or not pending_request.args:
        return None
    request = pending_request.args[0]
    return request.progress if isinstance(request, WholeRequest) else None
