"""The trap: while it is set, nothing in this process can be unpickled, by whichever way in.

Two nets. The names through which people unpickle (``pickle.load``, ``pickle.loads``,
``pickle.Unpickler``, ``torch.load`` without ``weights_only``) are replaced. And CPython announces
every global that an unpickler looks up, C or Python, as the audit event ``pickle.find_class``:
whoever bound ``loads`` before the trap was set is caught as soon as a pickle names anything that
could run. What was caught is remembered, because a library may swallow the exception.

An audit hook cannot be taken away again: it sleeps while the trap is not set.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

_caught: list[str] = []
_armed = _hears = False


class Unpickled(Exception):
    """Something was about to be unpickled."""


def _refuse(what: str) -> NoReturn:
    _caught.append(what)
    raise Unpickled(f"{what} was about to unpickle; nothing in this project may")


def _load(*args: Any, **kwargs: Any) -> NoReturn:
    _refuse("pickle.load")


def _loads(*args: Any, **kwargs: Any) -> NoReturn:
    _refuse("pickle.loads")


class _Unpickler(pickle.Unpickler):
    """A class all the same, so that libraries can still derive from it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("pickle.Unpickler")


_torch_load = torch.load


def _load_weights(*args: Any, **kwargs: Any) -> Any:
    if kwargs.get("weights_only", True) is not True:
        _refuse("torch.load without weights_only")
    return _torch_load(*args, **{**kwargs, "weights_only": True})


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if _armed and event == "pickle.find_class":
        _refuse(f"the global {args[0]}.{args[1]} of a pickle")


_NETS: tuple[tuple[Any, str, Any, Any], ...] = (
    (pickle, "load", pickle.load, _load),
    (pickle, "loads", pickle.loads, _loads),
    (pickle, "Unpickler", pickle.Unpickler, _Unpickler),
    (torch, "load", _torch_load, _load_weights),
)


def arm() -> None:
    """Set the trap for the rest of this process, and of those it forks."""
    global _hears
    if not _hears:
        sys.addaudithook(_hear)
        _hears = True
    _set(True)


def _set(armed: bool) -> None:
    global _armed
    _armed = armed
    for module, name, real, net in _NETS:
        setattr(module, name, net if armed else real)


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """For a test of pickling itself, which loads what it has just written."""
    _set(False)
    try:
        yield
    finally:
        _set(True)


def caught() -> list[str]:
    """What was caught since the last time that somebody asked."""
    found = _caught.copy()
    _caught.clear()
    return found


def check() -> None:
    """Fail if anything was caught since the last time, swallowed or not."""
    found = caught()
    if found:
        raise Unpickled(f"unpickled in this test: {', '.join(found)}")
