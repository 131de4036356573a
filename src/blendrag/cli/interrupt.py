"""Ctrl-C: stop cleanly if that is quick, and stop all the same if it is not.

The first Ctrl-C raises ``KeyboardInterrupt`` where the main thread is, and starts a clock: native
code (loading weights, a long forward) may not come back for a while. When the clock runs out, or at
a second Ctrl-C, the process leaves at once. That is safe at any moment: what the store has
acknowledged survives a kill.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

STATUS = 130
#: Time to wind up after the first Ctrl-C.
GRACE_S = 3.0

_requested = False
_grace_s = GRACE_S
_sentence = "nothing is left running"


def install() -> None:
    """Take over SIGINT, unless whoever started us wants it ignored (``nohup``, ``&``)."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _handle)


def expect(sentence: str, grace_s: float = GRACE_S) -> None:
    """What to say, and how long to wait, should Ctrl-C come from now on."""
    global _sentence, _grace_s
    _sentence, _grace_s = sentence, grace_s


def requested() -> bool:
    """Whether there was a Ctrl-C in this process."""
    return _requested


def sentence() -> str:
    return _sentence


def leave(status: int) -> None:
    """Flush and leave without waiting for threads that are busy in native code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(status)


def _handle(number: int, frame: FrameType | None) -> None:
    global _requested
    if _requested:
        _leave_now()
    _requested = True
    clock = threading.Timer(_grace_s, _leave_now)
    clock.daemon = True
    with suppress(RuntimeError):  # no more threads: then a second Ctrl-C has to do
        clock.start()
    raise KeyboardInterrupt


def _leave_now() -> None:
    show_cursor = "\x1b[?25h\n" if sys.stderr.isatty() else ""
    os.write(2, f"{show_cursor}interrupted: {_sentence}\n".encode())
    os._exit(STATUS)
