"""What a command ends with: exit statuses, and one sentence for every error a user can cause.

Owns the mapping from exceptions to statuses. A traceback means a defect of ours, never bad input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import typer

from blendrag.cli import interrupt
from blendrag.errors import (
    BlendragError,
    ContextOverflowError,
    CorruptKVError,
    NoThreadError,
    RequestCancelled,
    StoreFullError,
    UnsupportedModelError,
    is_out_of_memory,
    is_out_of_space,
    is_out_of_threads,
)

DONE = 0
#: Some inputs failed, or there was no room for all of them.
FAILED = 1
USER_ERROR = 2
REFUSED_MODEL = 3
INTERRUPTED = 130

P = ParamSpec("P")


def status_of(error: BlendragError) -> int:
    """Exit status of an error that ended a command."""
    if isinstance(error, UnsupportedModelError):
        return REFUSED_MODEL
    if isinstance(error, StoreFullError | CorruptKVError | NoThreadError):
        return FAILED
    if isinstance(error, RequestCancelled):
        return INTERRUPTED
    return USER_ERROR


def say(kind: str, text: str) -> None:
    """One line on stderr: ``error: …``, ``note: …``."""
    typer.echo(f"{kind}: {' '.join(str(text).split())}", err=True)


def reporting(command: Callable[P, int]) -> Callable[P, None]:
    """Turn a command's result or error into its exit status and at most one sentence."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            status = command(*args, **kwargs)
        except KeyboardInterrupt:
            status = _interrupted()
        except Exception as error:
            if interrupt.requested():  # whatever broke, it broke because of Ctrl-C
                status = _interrupted()
            elif isinstance(error, BlendragError):
                if isinstance(error, ContextOverflowError):
                    error = error.by("--top-k")
                say("error", str(error))
                status = status_of(error)
            elif (sentence := _foreign(error)) is not None:
                say("error", sentence)
                status = FAILED
            else:
                raise
        raise typer.Exit(status)

    return run


def _interrupted() -> int:
    say("interrupted", interrupt.sentence())
    return INTERRUPTED


def _foreign(error: Exception) -> str | None:
    """A sentence for resources that ran out beneath us; ``None`` for defects."""
    if is_out_of_threads(error):
        return str(NoThreadError())
    if is_out_of_memory(error):
        return "out of memory; use a smaller model, another --dtype or fewer chunks (--top-k)"
    if is_out_of_space(error):
        filename = getattr(error, "filename", None)
        where = f" writing {filename}" if filename else ""
        return f"no space left{where}; free some, what was stored before is intact"
    return None
