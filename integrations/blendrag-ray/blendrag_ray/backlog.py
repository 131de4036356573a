"""How many requests a new one would wait for at a replica, from when earlier ones were sent and answered.

A replica prefills one prompt after another and decodes all answers together. So a request without an answer
counts 1, the one whose turn it is counts the part that is left of a usual one, and one that is being answered
counts little.
"""

from __future__ import annotations

from dataclasses import dataclass

#: What a request that is being answered counts: it slows the next one down, but does not block it.
ANSWERED = 1 / 8
#: Weight of the latest request in the usual time.
LATEST = 0.1


@dataclass(eq=False)
class Progress:
    """How far a request is; shared by the ingress and its router, which are in one process.

    Times are those of ``time.monotonic``.
    """

    sent_at: float = 0.0
    answered_at: float | None = None
    """When the first part of its answer arrived."""
    has_ended: bool = False


class Backlog:
    """The requests that were sent to one replica and have not ended."""

    def __init__(self) -> None:
        self._waiting: list[Progress] = []
        self._answered: list[Progress] = []
        self._last_answer_at = 0.0
        self._usual_s: float | None = None
        """From the turn of a request to its answer."""

    def add(self, request: Progress, now: float) -> None:
        request.sent_at = now
        self._waiting.append(request)

    def __contains__(self, request: Progress) -> bool:
        return request in self._waiting or request in self._answered

    def discard(self, request: Progress) -> None:
        """Forget ``request``, which another replica gets."""
        if request in self._waiting:
            self._waiting.remove(request)

    def requests(self, now: float) -> float:
        """How many requests a new one would wait for."""
        self._look()
        ahead = len(self._answered) * ANSWERED
        if self._waiting:
            done_s = now - max(self._waiting[0].sent_at, self._last_answer_at)
            left = max(0.0, 1 - done_s / self._usual_s) if self._usual_s else 1.0
            ahead += left + len(self._waiting) - 1
        return ahead

    def _look(self) -> None:
        """Note what was answered and what has ended since the last time."""
        waiting: list[Progress] = []
        answered: list[tuple[float, Progress]] = []
        for request in self._waiting:
            if request.answered_at is not None:
                answered.append((request.answered_at, request))
            elif not request.has_ended:
                waiting.append(request)
        for answered_at, request in sorted(answered, key=lambda each: each[0]):
            took_s = max(0.0, answered_at - max(request.sent_at, self._last_answer_at))
            usual_s = took_s if self._usual_s is None else self._usual_s
            self._usual_s = usual_s + LATEST * (took_s - usual_s)
            self._last_answer_at = answered_at
        every = [*self._answered, *(request for _, request in answered)]
        self._waiting = waiting
        self._answered = [request for request in every if not request.has_ended]
