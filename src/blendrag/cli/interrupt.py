"""Ctrl-C: stop cleanly if that is quick, otherwise leave.

The first Ctrl-C raises ``KeyboardInterrupt`` in the main thread and starts a timer, because native code may
not return for a while. When the timer ends, or at a second Ctrl-C, the process exits at once. That is always
safe: whatever the store has acknowledged survives a kill.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from blendrag.wording import printable_line

STATUS = 130
#: Time for a clean stop after the first Ctrl-C.
GRACE_S = 3.0

#: Called before the process exits at once, to remove temporary files.
cleanups: list[Callable[[], object]] = []

_requested = False
_grace_s = GRACE_S
_sentence = "nothing is left running"


def install() -> None:
    """Handle SIGINT, unless the parent process ignores it (``nohup``, ``&``)."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _handle)


@contextmanager
def left_to_caller() -> Iterator[None]:
    """Ctrl-C raises ``KeyboardInterrupt`` each time and ends nothing."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def expect(sentence: str, grace_s: float = GRACE_S) -> None:
    """Set what a Ctrl-C prints from now on, and how long a clean stop may take."""
    global _sentence, _grace_s
    _sentence, _grace_s = printable_line(sentence), grace_s


def requested() -> bool:
    """Whether this process received a Ctrl-C."""
    return _requested


def sentence() -> str:
    return _sentence


def leave(status: int) -> None:
    """Flush and exit without waiting for threads in native code."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _handle(number: int, frame: FrameType | None) -> None:
    global _requested
    if _requested:
        _leave_now()
    _requested = True
    timer = threading.Timer(_grace_s, _leave_now)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread left for the timer: a second Ctrl-C still works
        timer.start()
    raise KeyboardInterrupt


def _leave_now() -> None:
    for cleanup in list(cleanups):
        with suppress(Exception):
            cleanup()
    show_cursor = "\x1b[?25h\n" if sys.stderr.isatty() else ""
    os.write(2, f"{show_cursor}interrupted: {_sentence}\n".encode())
    os._exit(STATUS)
