"""A child that does harm and says beforehand what, so that a hang or a death has a name.

Owns the child's life and the watch over it. Knows no store.
"""

from __future__ import annotations

import logging
import mmap
import os
import random
import select
import signal
import time
from collections.abc import Callable

import unpickling
from soak.audit import PATIENCE_S, summary
from soak.line import Heard, Teller

_NOTES_BYTES = 4096

#: Is given chance, how often to do it, and a line to the parent, on which it says ``done`` now and then.
Action = Callable[[random.Random, int, Teller], None]


class Watched:
    """Runs one child after the other."""

    def __init__(self) -> None:
        self._notes = mmap.mmap(-1, _NOTES_BYTES)

    def note(self, text: str) -> None:
        """Called in a child: what comes next."""
        self._notes[:] = text.encode().ljust(_NOTES_BYTES, b"\0")

    def about(self) -> str:
        """What was noted last, also by a child that is dead."""
        return self._notes[:].rstrip(b"\0").decode()

    def run(self, action: Action, seed: str, count: int) -> tuple[Heard, str | None]:
        """What a child said, and how it failed to come to an end."""
        source, sink = os.pipe()
        os.set_blocking(source, False)
        child = os.fork()
        if child == 0:
            os.close(source)
            self._live(action, random.Random(seed), count, Teller(sink))
        os.close(sink)
        heard = Heard()
        try:
            failure = _watch(child, source, heard)
        finally:
            os.close(source)
        if failure is None and heard.attempts != 1:
            failure = "crash: the reader died"
        return heard, failure

    def _live(self, action: Action, chance: random.Random, count: int, teller: Teller) -> None:
        """The child's whole life."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        logging.disable(logging.CRITICAL)
        unpickling.arm()
        try:
            action(chance, count, teller)
            teller.say("attempted", None)
        except BaseException as exc:
            teller.say("complaint", f"crash: {summary(exc)} at {self.about()}")
            teller.say("attempted", None)
        finally:
            os._exit(0)


def _watch(child: int, source: int, heard: Heard) -> str | None:
    """Wait for the child's end; what is wrong with it."""
    try:
        deadline, beats = time.monotonic() + PATIENCE_S, 0
        while not os.waitpid(child, os.WNOHANG)[0]:
            select.select([source], [], [], 0.05)
            heard.hear(source)
            if heard.beats > beats:
                deadline, beats = time.monotonic() + PATIENCE_S, heard.beats
            if time.monotonic() > deadline:
                return f"hang: nothing read within {PATIENCE_S} s"
        child = 0
        heard.hear(source)
        return None
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
