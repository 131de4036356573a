"""Forked children that tell their parent what they do, and are watched, interrupted or killed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import unpickling

#: How long a child may take for something that takes milliseconds.
PATIENCE_S = 60.0


class Teller:
    """A child's side of the pipe to its parent. A kill cannot cut a line in two."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def say(self, kind: str, what: object = None) -> None:
        """``kind`` is a name of the lists and fields of :class:`ChildReport`."""
        os.write(self._pipe, json.dumps([kind, what]).encode() + b"\n")


class ChildReport:
    """The parent's side of the pipe: what the child has said so far."""

    def __init__(self, pipe: int) -> None:
        self.acknowledged: list[int] = []
        """Chunks whose put has returned."""
        self.errors: list[str] = []
        """Named errors, which the store may raise."""
        self.complaints: list[str] = []
        self.ended = False
        """Whether the action came to its end."""
        self.answer: Any = None
        self.about = ""
        """What the child did last."""
        self.done = 0
        self._pipe, self._rest = pipe, b""
        os.set_blocking(pipe, False)

    def hear(self, wait_s: float = 0.0) -> bool:
        """Read what is in the pipe, after waiting up to ``wait_s``; whether there was anything."""
        heard = False
        select.select([self._pipe], [], [], wait_s)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipe, 1 << 16):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for kind, what in map(json.loads, lines):
                    heard = True
                    if isinstance(said := getattr(self, kind), list):
                        said.append(what)
                    else:
                        setattr(self, kind, what)
        return heard

    def close(self) -> None:
        self.hear()
        os.close(self._pipe)


class Child:
    """Runs ``action`` in a forked process. No torch operators there."""

    def __init__(self, action: Callable[[Teller], object], interruptible: bool = False) -> None:
        source, sink = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(source)
            _live(action, Teller(sink), interruptible)
        os.close(sink)
        self.heard = ChildReport(source)

    def has_ended(self) -> bool:
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = 0
        return not self.pid

    def wait(self, patience_s: float = PATIENCE_S) -> ChildReport:
        """Wait until it ends; killed, with a complaint, if it says nothing for ``patience_s``."""
        deadline = time.monotonic() + patience_s
        while not self.has_ended():
            if self.heard.hear(0.02):
                deadline = time.monotonic() + patience_s
            elif time.monotonic() > deadline:
                self.heard.complaints.append(f"hang: silent for {patience_s} s")
                break
        heard = self.kill()
        if not heard.ended and not heard.complaints:
            heard.complaints.append("crash: the child died")
        return heard

    def goes_on(self) -> bool:
        """Wait until it says something more; whether it does."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.heard.hear(0.02):
            if self.has_ended() and not self.heard.hear():
                self.heard.complaints.append("a child ended by itself")
                return False
            if time.monotonic() > deadline:
                self.heard.complaints.append(f"hang: silent for {PATIENCE_S} s")
                return False
        return True

    def interrupt(self, times: int, chance: random.Random) -> None:
        """Send SIGINT again and again, and wait until it has ended cleanly."""
        for _ in range(times):
            if not self.has_ended():
                os.kill(self.pid, signal.SIGINT)
            time.sleep(chance.random() * 0.003)
        deadline = time.monotonic() + PATIENCE_S
        while not self.has_ended():
            if time.monotonic() > deadline:
                self.heard.complaints.append(f"hang: not interrupted within {PATIENCE_S} s")
                return
            time.sleep(0.001)

    def kill(self) -> ChildReport:
        """Kill it if it lives, and return all that it said."""
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        self.heard.close()
        return self.heard


def summary(error: BaseException) -> str:
    """An unexpected exception, and where in the store it was raised."""
    frames = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "blendrag" in frame.filename
    ]
    return f"{type(error).__name__}: {error} at {' '.join(frames[-4:])}"


def _live(action: Callable[[Teller], object], teller: Teller, interruptible: bool) -> None:
    """The child's whole life. Without ``interruptible``, SIGINT is for its parent."""
    sys.unraisablehook = lambda unraisable: None
    logging.disable(logging.CRITICAL)
    unpickling.arm()
    signal.signal(signal.SIGALRM, _interrupted)
    signal.signal(signal.SIGINT, _interrupted if interruptible else signal.SIG_IGN)
    try:
        _act(action, teller)
        teller.say("ended", True)
    except KeyboardInterrupt:
        pass
    except BaseException as exc:
        teller.say("complaints", f"crash: {summary(exc)}")
    finally:
        os._exit(0)


def _act(action: Callable[[Teller], object], teller: Teller) -> None:
    action(teller)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, and again later: Python swallows it in ``__del__`` and weakref callbacks.

    Only below :func:`_act`: elsewhere it would run into the code of the parent, which is copied here.
    """
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while frame is not None and frame.f_code is not _act.__code__:
        frame = frame.f_back
    if frame is not None:
        raise KeyboardInterrupt
