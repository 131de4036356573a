"""Which batch is embedded next, and when: on the cores on which a model computes, too.

Two OpenMP teams on busy cores are ten times slower than one after the other, so either the model computes or
one batch is embedded. The thread that computes the model lets batches in between two layers or tokens
(:meth:`EmbeddingTurns.before_step`). Short calls, such as questions, go first; long ones take turns, batch by
batch, and get a sixth of the time while the model computes. Nobody waits without limit: a batch or a forward
that takes longer than :data:`MAX_MUTUAL_WAIT_S` runs next to the other.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: Seconds that the model waits for a batch, and a batch for the model's next layer.
MAX_MUTUAL_WAIT_S = 2.0
#: How long the model computes before the next batch is let in, as a multiple of the time of the last one.
MODEL_PER_SHORT, MODEL_PER_LONG = 1, 5
#: Batches of short calls after which a waiting long call gets its turn.
SHORT_PER_LONG = 8
#: How often a waiting caller checks whether it still needs its turn.
CHECK_INTERVAL_S = 0.05

#: Called while waiting and between batches; raises to give up.
Check = Callable[[], None]


def proceed() -> None:
    """The check of a call that nobody abandons."""


@dataclass(eq=False)
class _Ticket:
    number: int
    is_short: bool
    is_overdue: bool = False
    """The model no longer waits for it."""


class EmbeddingTurns:
    """Thread-safe. Without a model that computes, batches run one after another."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._waiting: list[_Ticket] = []
        self._running: _Ticket | None = None
        self._admitted: _Ticket | None = None
        """What the model waits for."""
        self._model_thread: int | None = None
        """Computes the model now."""
        self.stepped_at = 0.0
        """When the model last began a layer or token."""
        self._short_in_row = 0
        self._due_at = {True: 0.0, False: 0.0}
        """When the next short and the next long batch may interrupt the model."""
        self.moved_at = clock()
        """When a batch ended, or the first began to wait."""

    @property
    def counts(self) -> tuple[int, int, float]:
        """Batches that wait and run, and seconds since one has ended."""
        with self._changed:
            waiting, running = len(self._waiting), int(self._running is not None)
            still_s = self._clock() - self.moved_at
        return waiting, running, still_s if waiting or running else 0.0

    # -- callers that embed ---------------------------------------------------------------------

    @contextmanager
    def turn(self, is_short: bool, check: Check = proceed) -> Iterator[None]:
        """Compute one batch within this context, alone."""
        ticket = _Ticket(next(self._numbers), is_short)
        with self._changed:
            if not self._waiting and self._running is None:
                self.moved_at = self._clock()
            self._waiting.append(ticket)
        try:
            while not self._begins(ticket):
                check()
        except BaseException:
            with self._changed:
                self._waiting.remove(ticket)
                self._changed.notify_all()
            raise
        began = self._clock()
        try:
            yield
        finally:
            with self._changed:
                now = self._clock()
                many = MODEL_PER_SHORT if is_short else MODEL_PER_LONG
                self._due_at[is_short] = now + many * (now - began)
                self._running = None
                self.moved_at = now
                self._changed.notify_all()

    def _begins(self, ticket: _Ticket) -> bool:
        """Whether it is the turn of ``ticket`` by now; waits a moment."""
        with self._changed:
            if not self._may_begin(ticket):
                self._changed.wait(CHECK_INTERVAL_S)
                if not self._may_begin(ticket):
                    return False
            self._waiting.remove(ticket)
            self._running = ticket
            self._short_in_row = self._short_in_row + 1 if ticket.is_short else 0
            return True

    def _may_begin(self, ticket: _Ticket) -> bool:
        if self._running is not None:
            return False
        if self._admitted is not None:
            return ticket is self._admitted
        if self._model_thread in (None, threading.get_ident()):
            return ticket is self._next()
        is_silent = self._clock() - self.stepped_at > MAX_MUTUAL_WAIT_S
        return is_silent and ticket is self._next()

    def _next(self, kinds: tuple[bool, ...] = (True, False)) -> _Ticket | None:
        """The first of the short calls, or of the long ones if several short ones came before."""
        first = {
            is_short: next((each for each in self._waiting if each.is_short is is_short), None)
            for is_short in kinds
        }
        short, long = first.get(True), first.get(False)
        if short is None or (long is not None and self._short_in_row >= SHORT_PER_LONG):
            return long
        return short

    # -- the thread that computes the model -------------------------------------------------------

    def before_step(self) -> None:
        """Called before each layer or token: let a batch run if one is due, and wait until it has."""
        self.stepped_at = self._clock()
        if self._model_thread is not None and not self._waiting and self._running is None:
            return
        with self._changed:
            self._model_thread = threading.get_ident()
            if self._running is not None:
                self._wait_for(self._running)
            else:  # also of a call that has just begun: short ones would follow each other without a gap
                due = tuple(kind for kind, at in self._due_at.items() if at <= self.stepped_at)
                self._admitted = self._next(due)
                if self._admitted is not None:
                    self._changed.notify_all()
                    self._wait_for(self._admitted)
                    self._admitted = None
        self.stepped_at = self._clock()

    def rest(self) -> None:
        """The model does not compute until the next :meth:`before_step`."""
        if self._model_thread is not None:
            with self._changed:
                self._model_thread = None
                self._changed.notify_all()

    def _wait_for(self, ticket: _Ticket) -> None:
        def is_over() -> bool:
            return self._running is not ticket and ticket not in self._waiting

        if not ticket.is_overdue:
            ticket.is_overdue = not self._changed.wait_for(is_over, MAX_MUTUAL_WAIT_S)
