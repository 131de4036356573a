"""One thread that does all work on the model: requests first, background work in between."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from blendrag.errors import InvalidInputError, NoThreadError, starting_thread

T = TypeVar("T")

CLOSED = "this engine is closed; make a new BlendEngine"


class Worker:
    """Runs foreground calls in order, background calls only while there are none."""

    def __init__(self) -> None:
        self._foreground: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._background: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self.closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def submit(self, call: Callable[[], T], background: bool = False) -> Future[T]:
        """Queue ``call``; its result or exception arrives in the future.

        A foreground call from the worker's thread runs at once. Background calls are cancelled once the
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
            (self._background if background else self._foreground).append((future, call))
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

    def drain(self) -> None:
        """Block until everything queued so far is done, background work included."""
        self._check_process()
        with self._changed:
            pending = [future for future, _ in (*self._foreground, *self._background)]
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
            for future, _ in self._background:
                future.cancel()
            self._background.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._foreground or self._background or self.closed):
                    self._changed.wait()
                queue = self._foreground or self._background
                if not queue:
                    return
                future, call = queue.popleft()
            _settle(future, call)
            # the error of a failed request would keep all that it had computed
            del future, call


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as exc:
        future.set_exception(exc)
