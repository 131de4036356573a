"""An answer in progress: waited for, iterated or awaited, alone or in a batch.

A caller that stops waiting stops the computation, and waiting ends at the request's timeout.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from blendrag.chat.reply import Reasoning
from blendrag.corpus.retriever import RetrievedChunk
from blendrag.engine.request import Answer, Request
from blendrag.engine.stream import AnswerStream
from blendrag.errors import NoThreadError, RequestCancelled, RequestTimeout, starting_thread
from blendrag.serving.pending import Pending
from blendrag.serving.thread_queue import ThreadQueue

T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class PendingAnswer(Pending[Answer]):
    """A request that was submitted."""

    request: Request
    stream: AnswerStream
    prefixes: object = None
    """The exact prefixes of its engine: others may wait for the same scheduler."""

    def wait(self) -> Answer:
        """Block until it is answered. Raises the request's error, or :class:`RequestTimeout`."""
        try:
            return self.future.result(self.stream.remaining_s)
        except TimeoutError:
            raise self._why_not() from None
        finally:
            self.stream.cancel()

    async def awaited(self) -> Answer:
        """:meth:`wait` without blocking the event loop; a cancelled task cancels the request."""
        try:
            async with asyncio.timeout(self.stream.remaining_s):
                await self._done()
            return self.future.result()
        except TimeoutError:
            raise self._why_not() from None
        finally:
            self.stream.cancel()

    async def _done(self) -> None:
        """Until the request has ended. ``asyncio.wrap_future`` would remove a cancelled request from the
        queue, and what was prefilled ahead of its turn would not be released."""
        done = asyncio.Event()
        self.future.add_done_callback(_setter_of(done))
        await done.wait()

    def _why_not(self) -> BaseException:
        """The error behind a ``TimeoutError``: the request's own, or that waiting took too long."""
        future = self.future
        failed = future.exception() if future.done() and not future.cancelled() else None
        return failed or self.stream.too_late()


class Pieces:
    """The state of both iterators over the text pieces of one answer."""

    with_reasoning = False
    """Whether pieces of reasoning (:class:`Reasoning`) are among them."""
    pending: PendingAnswer | None = None
    _over = False

    def close(self) -> None:
        """Stop generation and return at once; the model is free within one layer or token."""
        self._over = True
        if self.pending is not None:
            self.pending.stream.cancel()

    def __del__(self) -> None:
        self.close()


class AnswerIterator(Pieces):
    """Text pieces of one answer; :attr:`answer` once exhausted."""

    pending: PendingAnswer

    def __init__(self, started: PendingAnswer) -> None:
        self.pending = started
        self.sources: tuple[RetrievedChunk, ...] = ()
        self.left_out = 0
        """How many of the oldest questions and answers the prompt is without (``trim_history``)."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._over:
            raise StopIteration
        try:
            piece = self.pending.stream.take()
            while not self.with_reasoning and isinstance(piece, Reasoning):
                piece = self.pending.stream.take()
        except BaseException:
            self.close()
            raise
        if piece is not None:
            return piece
        self._over = True
        if not self.pending.stream.cancelled:
            self.pending.wait()  # its error surfaces here
        raise StopIteration

    @property
    def answer(self) -> Answer:
        """The whole answer; blocks until it is complete. Raises :class:`RequestCancelled` once closed."""
        if self._over and not self.pending.future.done():
            self.pending.stream.check()
        return replace(self.pending.wait(), sources=self.sources)


class AsyncAnswerIterator(Pieces):
    """:class:`AnswerIterator` for event loops: no thread waits for a piece. Starts when iterated."""

    def __init__(self, start: Callable[[], Awaitable[PendingAnswer]]) -> None:
        self._start = start
        self._new = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        if self._over:
            raise StopAsyncIteration
        try:
            started = self.pending or await self._begin()
            piece = await self._take(started.stream)
            while not self.with_reasoning and isinstance(piece, Reasoning):
                piece = await self._take(started.stream)
        except BaseException:
            self.close()
            raise
        if piece is not None:
            return piece
        self._over = True
        if not started.stream.cancelled:
            await started.awaited()
        raise StopAsyncIteration

    async def submitted(self) -> None:
        """Wait until the request was checked and is in the queue. Raises what is wrong with it."""
        try:
            self.pending or await self._begin()
        except BaseException:
            self.close()
            raise

    async def _begin(self) -> PendingAnswer:
        self.pending = await self._start()
        # no reference to this iterator: dropping it must end the request
        self.pending.stream.listen(_setter_of(self._new))
        if self._over:  # closed during planning
            self.pending.stream.cancel()
        return self.pending

    async def _take(self, stream: AnswerStream) -> str | None:
        while True:
            self._new.clear()
            with suppress(queue.Empty):
                return stream.take(block=False)
            try:
                async with asyncio.timeout(stream.remaining_s):
                    await self._new.wait()
            except TimeoutError:
                raise stream.too_late() from None

    @property
    def answer(self) -> Answer:
        """The whole answer, once exhausted. Raises :class:`RequestCancelled` before, and once closed."""
        if self.pending is None or not self.pending.future.done():
            raise RequestCancelled(
                "there is no answer yet; iterate to the end before asking for it"
            )
        return self.pending.future.result()

    async def aclose(self) -> None:
        """:meth:`close`, for ``contextlib.aclosing``."""
        self.close()


def _setter_of(event: asyncio.Event) -> Callable[..., None]:
    """Sets ``event``, an event of the running loop, from any thread and with any arguments."""
    loop = asyncio.get_running_loop()

    def set_event(*_: object) -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(event.set)

    return set_event


def in_pool(begin: Callable[[], T]) -> asyncio.Future[T]:
    """``begin()`` on a thread of the event loop. Raises :class:`NoThreadError`."""
    refused = False

    def begin_unless_refused() -> T:
        if refused:  # the pool keeps a call that found no thread and gives it to the next thread
            raise NoThreadError
        return context.run(begin)

    context = copy_context()  # with the caller's span
    try:
        with starting_thread():
            return asyncio.get_running_loop().run_in_executor(None, begin_unless_refused)
    except NoThreadError:
        refused = True
        raise


async def off_loop(begin: Callable[[], T], timeout_s: float | None, threads: ThreadQueue) -> T:
    """``begin()`` on another thread. Leaving early or a timeout abandons it, and requests that it started.

    Raises :class:`NoThreadError`.
    """
    queued = threads.submit(begin)
    starting = asyncio.wrap_future(queued)
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(starting)
    except BaseException as exc:
        if starting.done() and not starting.cancelled() and starting.exception() is exc:
            raise
        if not queued.cancel():
            starting.add_done_callback(_abandon)
        if isinstance(exc, TimeoutError) and timeout_s is not None:
            raise RequestTimeout(timeout_s) from None
        raise


def _abandon(starting: asyncio.Future[Any]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        abandon_all(starting.result())


def wait_all(
    started: Sequence[PendingAnswer | Exception], keep_errors: bool
) -> list[Answer | Exception]:
    """Answers in order. The first error ends all and is raised; ``keep_errors`` returns errors in place."""
    answers: list[Answer | Exception] = []
    try:
        for i, one in enumerate(started):
            try:
                if isinstance(one, Exception):
                    raise one
                answers.append(one.wait())
            except Exception as exc:
                name_prompt(exc, i, len(started))
                if not keep_errors:
                    raise
                answers.append(exc)
    finally:
        abandon_all(started)
    return answers


async def all_awaited(
    started: Sequence[PendingAnswer | Exception], keep_errors: bool
) -> list[Answer | Exception]:
    """:func:`wait_all` without blocking the event loop."""
    try:
        for one in started:
            if isinstance(one, PendingAnswer):
                try:
                    await one.awaited()
                except Exception:
                    if not keep_errors:
                        break
    except BaseException:
        abandon_all(started)
        raise
    return wait_all(started, keep_errors)


def abandon_all(started: Sequence[PendingAnswer | Exception]) -> None:
    """Stop the computation of all that are not answered."""
    for one in started:
        if isinstance(one, PendingAnswer):
            one.stream.cancel()


def name_prompt(exc: Exception, index: int, count: int) -> None:
    if count > 1:
        exc.add_note(f"prompt {index + 1} of {count} of this batch")
