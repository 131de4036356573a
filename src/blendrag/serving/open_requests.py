"""Requests of clients, from their arrival until their answers were read: longer than their calls on a model.

Each :class:`~blendrag.serving.scheduler.Scheduler` has them. An ingress in another process keeps those that
it sent to a scheduler in the same way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

#: What a request that is being answered counts: it slows the next one down, but does not block it.
ANSWERED_WEIGHT = 1 / 8
#: Weight of the latest turn in the usual one.
LATEST_TURN_WEIGHT = 0.1


@dataclass(eq=False)
class OpenRequest:
    """How far a request is."""

    decodes: bool = True
    """Whether the model computes its answer."""
    opened_at: float = 0.0
    begun_at: float | None = None
    """When the first part of its answer was there, or other work began."""
    is_answered: bool = False
    """Whether its answer is complete; the client may still leave before it has read it."""
    has_ended: bool = False


class OpenRequests:
    """The requests that were opened and have not ended. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._waiting: list[OpenRequest] = []
        self._running: list[OpenRequest] = []
        self._lock = threading.Lock()
        self._last_begun_at = 0.0
        self.turn_s: float | None = None
        """How long a request usually computes until its answer begins; ``None`` if none has begun."""

    @contextmanager
    def opened(self, decodes: bool = True) -> Iterator[OpenRequest]:
        request = OpenRequest(decodes)
        self.open(request)
        try:
            yield request
        finally:
            request.has_ended = True

    def open(self, request: OpenRequest) -> None:
        request.opened_at = self.clock()
        with self._lock:
            self._waiting.append(request)

    def begin(self, request: OpenRequest) -> None:
        """Note the first part of the answer."""
        request.begun_at = request.begun_at or self.clock()

    def discard(self, request: OpenRequest) -> None:
        """Forget ``request``, which another scheduler gets."""
        with self._lock, suppress(ValueError):
            self._waiting.remove(request)

    def __contains__(self, request: OpenRequest) -> bool:
        return request in self._waiting or request in self._running

    def __len__(self) -> int:
        return sum(self.counts)

    @property
    def counts(self) -> tuple[int, int]:
        """How many wait for the first part of their answers, and how many have it."""
        with self._lock:
            self._look()
            return len(self._waiting), len(self._running)

    @property
    def ahead(self) -> float:
        """How many requests a new one would wait for.

        Requests are prefilled one after another, and all answers are decoded together. So a request without
        an answer counts 1, the one whose turn it is counts the part that is left of a usual one, and one that
        is being answered counts little.
        """
        with self._lock:
            self._look()
            ahead = len(self._running) * ANSWERED_WEIGHT
            if self._waiting:
                done_s = self.clock() - max(self._waiting[0].opened_at, self._last_begun_at)
                left = max(0.0, 1 - done_s / self.turn_s) if self.turn_s else 1.0
                ahead += left + len(self._waiting) - 1
            return ahead

    def _look(self) -> None:
        """Note which have begun and which have ended since the last time."""
        begun, waiting = [], []
        for request in self._waiting:
            begun_at = request.begun_at  # read once, as another thread may be setting it
            if begun_at is not None:
                begun.append((begun_at, request))
            elif not request.has_ended:
                waiting.append(request)
        for begun_at, request in sorted(begun, key=lambda each: each[0]):
            if request.decodes:
                took_s = max(0.0, begun_at - max(request.opened_at, self._last_begun_at))
                usual_s = took_s if self.turn_s is None else self.turn_s
                self.turn_s = usual_s + LATEST_TURN_WEIGHT * (took_s - usual_s)
                self._last_begun_at = begun_at
            self._running.append(request)
        self._waiting = waiting
        self._running = [r for r in self._running if not r.has_ended]
