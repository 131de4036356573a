"""One thread that does all work on the model: requests first, background work in between.

Requests that may run at the same time take turns (:mod:`blendrag.serving.turns`). Everything else runs alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from blendrag.corpus.embedding_turns import EmbeddingTurns
from blendrag.engine.thread_queue import QueueState
from blendrag.errors import InvalidInputError, NoThreadError, starting_thread
from blendrag.serving.kv_budget import KVBudget
from blendrag.serving.turns import Turns

T = TypeVar("T")

CLOSED = "this engine is closed; make a new BlendEngine"


def _never() -> bool:
    return False


class _Job(NamedTuple):
    future: Future[Any]
    call: Callable[[], Any]
    joins: Callable[[], bool]
    is_over: Callable[[], bool]


class Worker:
    """Begins foreground calls in order, background calls only while there are none."""

    def __init__(
        self, budget: KVBudget | None = None, embedding: EmbeddingTurns | None = None
    ) -> None:
        """``budget``: of the KV of requests (:class:`Turns`). ``embedding``: of an embedder that computes on
        the same cores."""
        self._budget = budget or KVBudget(0)
        self._embedding = embedding or EmbeddingTurns()
        self._foreground: deque[_Job] = deque()
        self._background: deque[_Job] = deque()
        self._running: set[Future[Any]] = set()
        self._changed = threading.Condition()
        self._submitted_at = 0.0
        """When there was something to do after there was nothing."""
        self.closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def submit(
        self,
        call: Callable[[], T],
        background: bool = False,
        joins: Callable[[], bool] = _never,
        is_over: Callable[[], bool] = _never,
    ) -> Future[T]:
        """Queue ``call``; its result or exception arrives in the future.

        ``joins()``, asked on the worker: whether it may begin while others that asked have not ended.
        ``is_over()``: whether it would end at once; then it does not wait for those before it. A foreground
        call from the worker's thread runs at once. Background calls are cancelled once the
        worker is closed. Raises :class:`NoThreadError` if the thread cannot be started.
        """
        future: Future[T] = Future()
        self._check_process()
        if threading.current_thread() is self._thread and not background:
            _settle(future, call)
            return future
        with self._changed:
            if self.closed and background:  # from a request that is being finished
                future.cancel()
                return future
            if self.closed:
                raise InvalidInputError(CLOSED)
            if self._thread is None:
                self._start()
            if not (self._foreground or self._running):
                self._submitted_at = time.monotonic()
            (self._background if background else self._foreground).append(
                _Job(future, call, joins, is_over)
            )
            self._changed.notify_all()
        return future

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="blendrag-engine", daemon=True)
        self._pid = os.getpid()
        try:
            with starting_thread():
                self._thread.start()
        except NoThreadError:
            self._thread = None
            raise

    def _check_process(self) -> None:
        """Refuse to work in a fork: it has no worker thread and may hold a lock that is never released."""
        if self._is_elsewhere:
            raise InvalidInputError(
                f"this engine belongs to process {self._pid}, and this is its fork {os.getpid()}; make a new "
                "BlendEngine here, or start processes by spawn"
            )

    @property
    def _is_elsewhere(self) -> bool:
        return self._thread is not None and self._pid != os.getpid()

    def run(self, call: Callable[[], T]) -> T:
        """Submit and wait."""
        return self.submit(call).result()

    @property
    def is_waited_for(self) -> bool:
        """Whether a foreground call is queued."""
        return bool(self._foreground)

    @property
    def state(self) -> QueueState:
        """Foreground calls that wait, and all that run."""
        with self._changed:
            waiting, running = len(self._foreground), len(self._running)
            moved_at = max(self._submitted_at, self._embedding.stepped_at)
        still_s = max(0.0, time.monotonic() - moved_at) if waiting or running else 0.0
        return QueueState("model", waiting, running, still_s)

    def drain(self) -> None:
        """Block until everything queued so far is done, background work included."""
        self._check_process()
        with self._changed:
            queued = (*self._foreground, *self._background)
            pending = [*self._running, *(job.future for job in queued)]
        for future in pending:
            with suppress(CancelledError):
                future.exception()
        self.submit(lambda: None).result()

    def close(self) -> None:
        """Finish foreground calls, drop background calls, end the thread. Idempotent."""
        if self._is_elsewhere:
            self.closed = True
            return
        with self._changed:
            self.closed = True
            for job in self._background:
                job.future.cancel()
            self._background.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        turns = Turns(self._budget, self._embedding)
        while True:
            if not turns:
                self._embedding.rest()
            job = None if turns.is_paused else self._next(turns)
            if job is None and not turns:
                return
            self._embedding.before_step()
            if job is not None:
                was_over = job.is_over()
                turns.start(partial(self._settle, job.future, job.call))
                # the error of a failed request would keep all that it had computed
                del job
                if was_over:
                    continue
            turns.step()

    def _next(self, turns: Turns) -> _Job | None:
        """The next call to begin; ``None`` if those that run must go on first, or after the last one."""
        while True:
            with self._changed:
                while not (self._foreground or self._background or self.closed or turns):
                    self._changed.wait()
                queue = self._foreground or self._background
                if not queue or (turns and queue is self._background):
                    return None
                jobs = list(queue)
            # calls are taken by this thread only
            chosen = jobs[0]
            if turns and not chosen.joins():
                over = [job for job in jobs if job.is_over()]
                if not over:
                    return None
                chosen = over[0]
            with self._changed:
                if chosen in queue:
                    queue.remove(chosen)
                    self._running.add(chosen.future)
                    return chosen

    def _settle(self, future: Future[Any], call: Callable[[], Any]) -> None:
        try:
            _settle(future, call)
        finally:
            with self._changed:
                self._running.discard(future)


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as exc:
        future.set_exception(exc)
