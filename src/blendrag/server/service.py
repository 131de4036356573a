"""One engine behind HTTP: its limits, its names, and the road of a request through it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

from blendrag.engine import Answer, BlendEngine
from blendrag.engine.answers import in_pool
from blendrag.errors import RequestTimeout
from blendrag.frameworks.streaming import Piece, astream_pieces, to_thread
from blendrag.server.access import ApiKeys
from blendrag.server.admission import Admission
from blendrag.server.asking import ServedRequest
from blendrag.server.limits import Limits
from blendrag.server.refusals import Refusal
from blendrag.wording import quoted

T = TypeVar("T")


class Told(NamedTuple):
    """A piece of an answer, and the request it belongs to."""

    asked: ServedRequest
    piece: Piece


@dataclass(frozen=True)
class Service:
    """An engine whose model is open."""

    engine: BlendEngine
    limits: Limits = field(default_factory=Limits)
    keys: ApiKeys = field(default_factory=ApiKeys)
    began: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def admission(self) -> Admission:
        return Admission(self.limits.max_requests)

    @cached_property
    def changing(self) -> asyncio.Lock:
        """Held while the corpus is changed."""
        return asyncio.Lock()

    @cached_property
    def _embedding(self) -> ThreadPoolExecutor:
        """One thread, so that long texts do not take those that other requests need."""
        return ThreadPoolExecutor(1, "blendrag-embeddings")

    @cached_property
    def model_id(self) -> str:
        return _short(self.engine.resources.model_name)

    @property
    def embedder_id(self) -> str:
        return _short(self.engine.resources.manifest.embedder)

    def check_open(self) -> None:
        """Raise :class:`Refusal` 503 once the engine is closed."""
        if self.engine.closed:
            raise Refusal(503, "the engine of this server is closed; start the server again")

    def check_model(self, name: str | None) -> None:
        """Raise :class:`Refusal` 404 for another model than the served one."""
        _check(name, self.model_id, self.engine.resources.model_name)

    def check_embedder(self, name: str | None) -> None:
        """Raise :class:`Refusal` 404 for another model than the store's embedder."""
        _check(name, self.embedder_id, self.engine.resources.manifest.embedder)

    async def pieces(
        self, make: Callable[[], ServedRequest], timeout_s: float | None = None
    ) -> AsyncGenerator[Told, None]:
        """The answer to a request in pieces, from the queue to its end. ``make`` runs on a thread.

        ``timeout_s``: what the request asks for; ``make`` checks it.
        """
        self.check_open()
        with self.admission.ticket() as ticket:
            asked = await _made(make, timeout_s)
            streaming = astream_pieces(self.engine, asked.prompt, asked.options)
            try:
                async with aclosing(streaming):
                    async for piece in streaming:
                        ticket.begun()
                        if piece.answer is not None:
                            ticket.answered(piece.answer.metrics)
                        yield Told(asked, piece)
            except RequestTimeout as late:
                raise RequestTimeout(timeout_s or late.timeout_s) from None

    async def embedded(self, work: Callable[[], T]) -> T:
        """``work()``, once all before it are done."""
        with self.admission.ticket():
            return await in_pool(work, self._embedding)

    async def answered(
        self, make: Callable[[], ServedRequest], timeout_s: float | None = None
    ) -> tuple[ServedRequest, Answer]:
        """The whole answer to a request."""
        async with aclosing(self.pieces(make, timeout_s)) as telling:
            async for asked, piece in telling:
                if piece.answer is not None:
                    return asked, piece.answer
        raise AssertionError("the last piece has the answer")


async def _made(make: Callable[[], ServedRequest], timeout_s: float | None) -> ServedRequest:
    """``make()`` on a thread. What that and the wait for a thread took is no longer left of the timeout."""
    began = time.perf_counter()
    limited = timeout_s is not None and timeout_s > 0
    try:
        async with asyncio.timeout(timeout_s if limited else None) as limit:
            asked = await to_thread(make)
    except TimeoutError:
        if timeout_s is not None and limit.expired():
            raise RequestTimeout(timeout_s) from None
        raise
    if timeout_s is None:
        return asked
    left_s = timeout_s - (time.perf_counter() - began)
    if left_s <= 0:
        raise RequestTimeout(timeout_s)
    return replace(asked, options=replace(asked.options, timeout_s=left_s))


def _short(name: str) -> str:
    """The last part of a directory, which clients can write; other names unchanged."""
    return Path(name).name if Path(name).is_absolute() else name


def _check(name: str | None, *known: str) -> None:
    if name is not None and name not in known:
        raise Refusal(
            404,
            f"the model {quoted(name)} is not served here; expected {known[0]!r}",
            param="model",
            code="model_not_found",
        )
