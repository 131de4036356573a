"""Whether another request is let in, and how requests ended."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blendrag.engine.exposition import family
from blendrag.metrics import RequestMetrics
from blendrag.server.refusals import ClientGoneError, Refusal, refusal_of
from blendrag.serving.open_requests import OpenRequest, OpenRequests
from blendrag.serving.thread_queue import QueueState

#: Least and most seconds after which a client that was turned away should ask again.
RETRY_AFTER_S, MAX_RETRY_AFTER_S = 2, 60

#: Upper ends of the histogram of times to first token.
TTFT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, math.inf)

ANSWERED, REFUSED, REJECTED, CANCELLED, FAILED = OUTCOMES = (
    "answered", "refused", "rejected", "cancelled", "failed",
)  # fmt: skip


class Admission:
    """Lets requests in, and counts how they ended. Used on the event loop only."""

    def __init__(self, max_requests: int, requests: OpenRequests) -> None:
        """``requests``: those of the scheduler."""
        self.max_requests = max_requests
        self.requests = requests
        self.outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self.tokens = Counter(dict.fromkeys(("prompt", "reused", "recomputed", "generated"), 0))
        self.embedded = Counter(dict.fromkeys(("texts", "tokens"), 0))
        self.ttft_s = 0.0
        self.within_s = Counter(dict.fromkeys(TTFT_BUCKETS_S, 0))
        """Answered requests by times to first token that they did not exceed."""

    @contextmanager
    def admitted(self, decodes: bool = True) -> Iterator[OpenRequest]:
        """Let one request in and count how it ends; ``decodes``: whether the model computes its answer.

        Raises :class:`Refusal` 429 if there are too many."""
        if len(self.requests) >= self.max_requests:
            self.outcomes[REJECTED] += 1
            raise self.overload()
        outcome = ANSWERED
        with self.requests.opened(decodes) as request:
            try:
                yield request
            except BaseException as exc:
                outcome = ANSWERED if request.is_answered else _outcome_of(exc)
                raise
            finally:
                self.outcomes[outcome] += 1

    def overload(self) -> Refusal:
        """The refusal of a request; it is told to ask again when another one will have begun."""
        retry_after_s = max(RETRY_AFTER_S, math.ceil(self.requests.turn_s or 0.0))
        return Refusal(
            429,
            f"{self.max_requests} requests are waiting or running, the limit of this server "
            "(--max-requests); ask again later",
            code="server_overloaded",
            headers={"Retry-After": str(min(MAX_RETRY_AFTER_S, retry_after_s))},
        )

    def note_embedded(self, texts: int, tokens: int) -> None:
        """Count the texts of an answered request for vectors."""
        self.embedded["texts"] += texts
        self.embedded["tokens"] += tokens

    def note(self, metrics: RequestMetrics) -> None:
        """Count what an answered request took."""
        self.ttft_s += metrics.ttft_s
        self.within_s.update(limit for limit in TTFT_BUCKETS_S if metrics.ttft_s <= limit)
        self.tokens["prompt"] += metrics.prompt_tokens
        self.tokens["reused"] += metrics.reused_tokens
        self.tokens["recomputed"] += metrics.recomputed_tokens
        self.tokens["generated"] += metrics.new_tokens

    def exposition(self) -> str:
        waiting, running = self.requests.counts
        lines = family("requests_waiting", "Requests without a first token.", {"": waiting})
        lines += family("requests_running", "Requests with a first token.", {"": running})
        lines += family(
            "requests_total",
            "Requests by outcome: answered, refused (wrong input), rejected (too many), cancelled (the "
            "client left), failed.",
            {f'{{outcome="{name}"}}': count for name, count in self.outcomes.items()},
        )
        lines += family(
            "tokens_total",
            "Tokens of answered requests.",
            {f'{{kind="{name}"}}': count for name, count in self.tokens.items()},
        )
        for name, count in self.embedded.items():
            text = f"{name.capitalize()} of answered requests for embeddings."
            lines += family(f"embedded_{name}_total", text, {"": count})
        buckets = {f'_bucket{{le="{_limit(end)}"}}': n for end, n in self.within_s.items()}
        sums = {"_sum": self.ttft_s, "_count": self.within_s[math.inf]}
        text = "Times to first token of answered requests."
        lines += family("ttft_seconds", text, buckets | sums, "histogram")
        return "".join(f"{line}\n" for line in lines)


def queues_exposition(queues: Sequence[QueueState]) -> str:
    """What waits and runs in each queue as Prometheus text."""
    labels = {queue.name: f'{{queue="{queue.name}"}}' for queue in queues}
    waiting = {labels[queue.name]: queue.waiting for queue in queues}
    running = {labels[queue.name]: queue.running for queue in queues}
    still_s = {labels[queue.name]: round(queue.still_s, 3) for queue in queues}
    lines = family("queue_waiting", "What waits in each queue.", waiting)
    lines += family("queue_running", "What runs of each queue.", running)
    text = "Seconds since a queue that is not empty has moved."
    lines += family("queue_still_seconds", text, still_s)
    return "".join(f"{line}\n" for line in lines)


def _limit(end_s: float) -> str:
    return "+Inf" if math.isinf(end_s) else f"{end_s:g}"


def _outcome_of(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError | GeneratorExit | ClientGoneError):
        return CANCELLED
    return REFUSED if refusal_of(error).status < 500 else FAILED
