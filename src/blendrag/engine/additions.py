"""Additions to a library on a thread of their own, some entries at a time, while the caller goes on.

An error ends what waits. It is raised once: by :meth:`BackgroundAdditions.wait`, or by the next call on the
library. Each step is added as a whole or not at all, so a process that ends loses no more than what waits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blendrag.corpus.documents import Entry
from blendrag.errors import InvalidInputError, NoThreadError, starting_thread
from blendrag.serving.scheduler import CLOSED

log = logging.getLogger(__name__)

#: Entries that are added at a time, unless the caller says otherwise.
STEP_ENTRIES = 16


@dataclass
class AdditionStep:
    """Entries that are added together, and how."""

    entries: Sequence[Entry]
    add: Callable[[Sequence[Entry]], object]


class AdditionProgress(NamedTuple):
    """How far the additions are that were begun since nothing waited."""

    done: int
    """Entries that were added."""
    total: int


class BackgroundAdditions:
    """What one library adds while its callers go on. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps: deque[AdditionStep] = deque()
        self._running: AdditionStep | None = None
        self._progress = AdditionProgress(0, 0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed = False

    @property
    def progress(self) -> AdditionProgress:
        return self._progress

    def submit(self, steps: Iterable[AdditionStep]) -> None:
        """Add these after those that wait. Raises the error of earlier ones, and :class:`NoThreadError`."""
        self.check()
        with self._changed:
            if self._closed:
                raise InvalidInputError(CLOSED)
            new = [*steps]
            done, total = self._progress if self._thread is not None else (0, 0)
            self._progress = AdditionProgress(done, total + sum(len(step.entries) for step in new))
            self._steps.extend(new)
            if self._thread is None and new:
                self._thread = threading.Thread(
                    target=self._work, name="blendrag-additions", daemon=True
                )
                try:
                    with starting_thread():
                        self._thread.start()
                except NoThreadError:
                    self._thread = None
                    self._steps.clear()
                    raise

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until all is added, or for so long; whether it is. Raises the error that ended it."""
        with self._changed:
            is_over = self._changed.wait_for(lambda: self._thread is None, timeout_s)
        self.check()
        return is_over

    def check(self) -> None:
        """Raise the error that ended earlier additions, once."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def forget(self, is_meant: Callable[[Entry], bool]) -> list[Entry]:
        """Do not add those that wait and are meant; returns them. A step that adds some has ended by then."""
        with self._changed:
            forgotten = [each for step in self._steps for each in step.entries if is_meant(each)]
            for step in self._steps:
                step.entries = [each for each in step.entries if not is_meant(each)]
            total = self._progress.total - len(forgotten)
            self._progress = self._progress._replace(total=total)
            running = self._running
            if running is not None and any(map(is_meant, running.entries)):
                self._changed.wait_for(lambda: self._running is not running)
        return forgotten

    def stop(self) -> None:
        """Begin no further step. Once the one that runs has ended, a warning says how many entries were not
        added."""
        with self._changed:
            self._closed = True
            self._steps.clear()

    def close(self) -> None:
        """:meth:`stop`, and wait for the step that runs. Idempotent."""
        self.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._running = self._steps.popleft() if self._steps else None
                self._changed.notify_all()
                step = self._running
                if step is None:
                    self._end(None)
                    return
            try:
                if step.entries:
                    step.add(step.entries)
            except BaseException as error:
                with self._changed:
                    self._end(error)
                return
            with self._changed:
                done = self._progress.done + len(step.entries)
                self._progress = self._progress._replace(done=done)

    def _end(self, error: BaseException | None) -> None:
        """The thread ends. Caller holds the lock."""
        left = self._progress.total - self._progress.done
        if self._closed and left:
            log.warning("%d entries were not added in the background; add them again", left)
        elif error is not None:
            error.add_note(f"{left} entries were not added in the background; add them again")
            self._error = error
        self._steps.clear()
        self._running = self._thread = None
        self._changed.notify_all()
