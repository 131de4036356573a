"""Engines behind HTTP: their limits, names and threads, and the road of a request through one of them.

Each kind of blocking work has its own threads, so that no kind waits for another:

=================  ===========================================================================
``prompts``        prompts are rendered and tokenised (the engine's; long ones have their own)
``questions``      chats that search the store, and embeddings of short texts
``embeddings``     embeddings of long texts
``changes``        ingests and removals, one at a time
``reads``          lists of documents, counters
=================  ===========================================================================
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from blendrag.corpus.embedder import embedder_names
from blendrag.corpus.embedding_turns import Check
from blendrag.engine import Answer, BlendEngine
from blendrag.engine.request import RagPrompt
from blendrag.errors import BlendragError, RequestTimeout
from blendrag.frameworks.streaming import Piece, astream_pieces
from blendrag.server.access import ApiKeys, Limits
from blendrag.server.admission import Admission, queues_exposition
from blendrag.server.asking import ServedRequest
from blendrag.server.refusals import Refusal
from blendrag.server.uploads import FileUploads
from blendrag.serving.thread_queue import QueueState, ThreadQueue
from blendrag.store.server_record import ServerRecord
from blendrag.wording import quoted, short_model

T = TypeVar("T")
#: Makes a request on a thread; its argument is a check that may raise to give up.
Make = Callable[[Check], ServedRequest]

#: How clients name a model if they do not care which.
ANY_MODEL = "default"
#: Threads of each kind of work. Batches of the embedder take turns, so more would only wait.
QUESTION_THREADS, EMBEDDING_THREADS, READ_THREADS = 4, 4, 2
#: Seconds without any progress after which ``/health`` names a queue.
STUCK_S = 120.0
#: Seconds that a counter or a name is waited for; then the last known one is told.
MAX_READ_WAIT_S = 1.0


def open_engine(engine: BlendEngine, needs_blending: bool) -> str:
    """Load what requests need; why retrieval is refused, if it is.

    Raises :class:`UnsupportedModelError` if the model cannot answer in the engine's mode, and what a wrong
    reranker raises.
    """
    engine.asking.open_reranker()
    engine.open()
    if needs_blending:
        engine.adapter.require_mode(engine.settings.mode)
    corpus = engine.corpus
    if corpus is not None and corpus.vectors.dim() is not None:
        try:
            engine.open_retrieval()
        except BlendragError as error:
            return f"retrieval and embeddings are refused: {error}"
    return ""


class ReplyPart(NamedTuple):
    """A piece of an answer, and the request it belongs to. The first piece ``is_queued``."""

    served: ServedRequest
    piece: Piece


class Service:
    """An engine whose model is open. Further ones may be served beside it (:meth:`beside`)."""

    def __init__(
        self,
        engine: BlendEngine,
        limits: Limits | None = None,
        keys: ApiKeys | None = None,
        hosts: tuple[str, ...] = (),
        origins: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
        record: ServerRecord | None = None,
    ) -> None:
        """``hosts``: further names of this machine (:func:`blendrag.server.access.checked_hosts`);
        ``origins``: whose pages may ask (:func:`blendrag.server.cross_origin.checked_origins`); ``record``:
        by which commands over the store find this server."""
        self.engine, self.limits, self.keys = engine, limits or Limits(), keys or ApiKeys()
        self.hosts, self.origins, self.clock = hosts, origins, clock
        self.record = record
        self.name = ""
        """What requests call it; empty for the first one, which has its model's name."""
        self.began = int(time.time())
        self.admission = Admission(self.limits.max_requests, engine.scheduler.requests)
        self.questions = ThreadQueue("questions", QUESTION_THREADS, clock)
        self.embeddings = ThreadQueue("embeddings", EMBEDDING_THREADS, clock, engine.progress_at)
        self.changes = ThreadQueue("changes", 1, clock, engine.progress_at)
        self.reads = ThreadQueue("reads", READ_THREADS, clock)
        self.uploads = FileUploads(engine, self.changes, self.limits.max_upload_bytes)
        self._last_known: dict[str, str] = {}

    def beside(self, engine: BlendEngine, name: str) -> Service:
        """Another engine, made ``beside`` this one's, which has the same limits, keys, counters and threads.

        Requests call it ``name``."""
        made = copy(self)
        made.engine, made.name = engine, name
        made.uploads = FileUploads(engine, self.changes, self.limits.max_upload_bytes)
        made._last_known = {}
        return made

    @property
    def queues(self) -> list[QueueState]:
        """Those of this engine, and those that it shares."""
        own = self.questions, self.embeddings, self.changes, self.reads
        return [*self.engine.queues, *(queue.state for queue in own)]

    def close(self) -> None:
        """End the threads of this server, which those beside it share."""
        for queue in (self.questions, self.embeddings, self.changes, self.reads):
            queue.close()

    @property
    def model_id(self) -> str:
        return self.name or short_model(self.engine.model_name)

    @property
    def embedder_id(self) -> str:
        return short_model(self.engine.manifest.embedder)

    def check_open(self) -> None:
        """Raise :class:`Refusal` 503 once the engine is closed."""
        if self.engine.closed:
            raise Refusal(503, "the engine of this server is closed; start the server again")

    def check_moving(self, queues: Sequence[QueueState] | None = None) -> None:
        """Raise :class:`Refusal` 503 if something waits or runs and has not moved for a long time.

        ``queues``: those of several services."""
        for queue in queues or self.queues:
            if queue.still_s >= STUCK_S:
                raise Refusal(
                    503,
                    f"nothing has moved for {queue.still_s:.0f} s in the queue {queue.name!r}: "
                    f"{queue.waiting} wait, {queue.running} run; start the server again if this lasts",
                    code="queue_stuck",
                )

    def check_writable(self) -> None:
        """Raise :class:`Refusal` 403 if nothing can be written into the store."""
        engine = self.engine
        if engine.store.read_only or (engine.corpus is not None and engine.corpus.read_only):
            raise Refusal(
                403,
                f"store {engine.root} is read-only here; change it where it can be written, or change its "
                "permissions",
                code="read_only_store",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it."""
        return (self.name,) if self.name else (self.model_id, self.engine.model_name)

    @property
    def embedder_names(self) -> tuple[str, ...]:
        """What requests may call its embedder: also by the names that ``ingest`` takes for the same model."""
        return self.embedder_id, *embedder_names(self.engine.manifest.embedder)

    async def pieces(
        self, make: Make, threads: ThreadQueue, timeout_s: float | None = None
    ) -> AsyncGenerator[ReplyPart, None]:
        """The answer to a request in pieces, from the queue to its end. ``make`` runs on one of ``threads``.

        ``timeout_s``: what the request asks for; ``make`` checks it.
        """
        self.check_open()
        with self.admission.admitted() as request:
            served = await _made(make, threads, timeout_s)
            prompt, options = served.prompt, served.options
            streaming = astream_pieces(self.engine, prompt, options, tells_queued=True)
            try:
                async with aclosing(streaming):
                    async for piece in streaming:
                        if not piece.is_queued:
                            self.admission.requests.begin(request)
                        if piece.answer is not None:
                            request.is_answered = True
                            self.admission.note(piece.answer.metrics)
                        yield ReplyPart(served, piece)
            except RequestTimeout as late:
                raise RequestTimeout(timeout_s or late.timeout_s) from None

    async def worked(self, work: Callable[[Check], T], threads: ThreadQueue) -> T:
        """``work(check)`` as a request, on one of ``threads``."""
        self.check_open()
        with self.admission.admitted(decodes=False) as request:
            return await threads.run(work, partial(self.admission.requests.begin, request))

    async def read(self, work: Callable[[], T]) -> T:
        """``work()`` on a thread. Raises :class:`Refusal` 429 if too many wait."""
        if self.reads.state.waiting >= self.limits.max_requests:
            raise self.admission.overload()
        return await self.reads.run(lambda check: work())

    async def read_or_last(self, name: str, work: Callable[[], str], otherwise: str = "") -> str:
        """``work()`` on a thread; what it gave last if the store is busy, at first ``otherwise``."""
        try:
            async with asyncio.timeout(MAX_READ_WAIT_S):
                self._last_known[name] = await self.reads.run(lambda check: work())
        except TimeoutError:
            pass
        return self._last_known.get(name, otherwise)

    def exposition(self, queues: Sequence[QueueState] | None = None) -> str:
        """The counts of this server as Prometheus text; ``queues``: those of several services."""
        return self.admission.exposition() + queues_exposition(queues or self.queues)

    async def answered(
        self, make: Make, threads: ThreadQueue, timeout_s: float | None = None
    ) -> tuple[ServedRequest, Answer]:
        async with aclosing(self.pieces(make, threads, timeout_s)) as parts:
            async for served, piece in parts:
                if piece.answer is not None:
                    return served, piece.answer
        raise AssertionError("the last piece has the answer")


async def _made(make: Make, threads: ThreadQueue, timeout_s: float | None) -> ServedRequest:
    """``make`` on a thread. What that and the wait for a thread took is no longer left of the timeout, and
    counts as time of the search if there was one."""
    began = time.perf_counter()
    limited = timeout_s is not None and timeout_s > 0
    try:
        async with asyncio.timeout(timeout_s if limited else None) as limit:
            served = await threads.run(make)
    except TimeoutError:
        if timeout_s is not None and limit.expired():
            raise RequestTimeout(timeout_s) from None
        raise
    took_s = time.perf_counter() - began
    if isinstance(served.prompt, RagPrompt):
        served = replace(served, prompt=replace(served.prompt, retrieval_s=took_s))
    if timeout_s is None:
        return served
    left_s = timeout_s - took_s
    if left_s <= 0:
        raise RequestTimeout(timeout_s)
    return replace(served, options=replace(served.options, timeout_s=left_s))


def not_served(name: str, *known: str) -> Refusal:
    expected = ", ".join(map(repr, known))
    return Refusal(
        404,
        f"the model {quoted(name)} is not served here; expected {'one of ' * (len(known) > 1)}{expected}; "
        "name that, or leave model out",
        param="model",
        code="model_not_found",
    )
