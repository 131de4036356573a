"""Threads for one kind of blocking work, so that no other kind waits for them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import TypeVar

from blendrag.corpus.embedding_turns import Check
from blendrag.errors import NoThreadError, RequestCancelled, starting_thread

T = TypeVar("T")


@dataclass(frozen=True)
class QueueState:
    """What waits and runs now."""

    name: str
    waiting: int
    running: int
    still_s: float
    """Seconds since something began or ended, or what is done has moved; 0 if there is nothing to do."""


class ThreadQueue:
    """At most ``threads`` calls run, the others wait in order. One cancelled there is forgotten at once."""

    def __init__(
        self,
        name: str,
        threads: int,
        clock: Callable[[], float] = time.monotonic,
        progress_at: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``progress_at()``: when calls that take long have last made progress."""
        self.name = name
        self._threads = threads
        self._clock = clock
        self._progress_at = progress_at
        self._lock = threading.Lock()
        self._waiting = self._running = 0
        self._moved_at = 0.0
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    @property
    def state(self) -> QueueState:
        with self._lock:
            waiting, running = self._waiting, self._running
            moved_at = max(self._moved_at, self._progress_at())
        still_s = max(0.0, self._clock() - moved_at) if waiting or running else 0.0
        return QueueState(self.name, waiting, running, still_s)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue ``call``, to be run in the caller's context. Raises :class:`NoThreadError`."""
        with self._lock:
            if self._pid != os.getpid():  # a fork has none of its threads
                self._pool, self._pid, self._waiting, self._running = None, os.getpid(), 0, 0
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, f"blendrag-{self.name}")
            if not (self._waiting or self._running):
                self._moved_at = self._clock()
            self._waiting += 1
            pool = self._pool
        calls, context = [call], copy_context()  # with the caller's span

        def work() -> T:
            if not calls:
                raise NoThreadError
            self._count(waiting=-1, running=1)
            try:
                return context.run(calls.pop())
            finally:
                self._count(running=-1)

        def forget_if_cancelled(future: Future[T]) -> None:
            if future.cancelled():  # the pool keeps it until a thread is free
                calls.clear()
                self._count(waiting=-1)

        try:
            with starting_thread():
                future = pool.submit(work)
        except BaseException:
            calls.clear()  # the pool keeps one that found no thread and gives it to the next one
            self._count(waiting=-1)
            raise
        future.add_done_callback(forget_if_cancelled)
        return future

    async def run(self, call: Callable[[Check], T], begun: Callable[[], None] | None = None) -> T:
        """``call(check)`` on a thread. If the task is cancelled, a call that waits is forgotten, and the
        ``check`` of one that runs raises :class:`RequestCancelled`.

        ``begun()`` is called on the event loop once it runs. Raises :class:`NoThreadError`.
        """
        loop, is_over = asyncio.get_running_loop(), threading.Event()

        def check() -> None:
            if is_over.is_set():
                raise RequestCancelled("the request was abandoned; nothing of it is left running")

        def tell_begun() -> None:
            if begun is not None and not is_over.is_set():
                begun()

        def work() -> T:
            check()
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(tell_begun)
            return call(check)

        try:
            return await asyncio.wrap_future(self.submit(work))
        finally:
            is_over.set()

    def close(self) -> None:
        """End the threads once their calls are over; a later call starts new ones. Idempotent."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.shutdown(wait=False)

    def _count(self, waiting: int = 0, running: int = 0) -> None:
        with self._lock:
            self._waiting += waiting
            self._running += running
            self._moved_at = self._clock()
