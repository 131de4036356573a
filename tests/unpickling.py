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
_armed = False


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


_NETS = (
    (pickle, "load", _load),
    (pickle, "loads", _loads),
    (pickle, "Unpickler", _Unpickler),
    (torch, "load", _load_weights),
)


def arm() -> None:
    """Set the trap for the rest of this process, and of those it forks."""
    global _armed
    if not _armed:
        sys.addaudithook(_hear)
    _armed = True
    for module, name, net in _NETS:
        setattr(module, name, net)


def caught() -> list[str]:
    """What was caught since the last time that somebody asked."""
    found = _caught.copy()
    _caught.clear()
    return found


@contextlib.contextmanager
def nothing_is_unpickled() -> Iterator[None]:
    """Fail when anything was caught in the block, swallowed or not."""
    caught()
    yield
    found = caught()
    if found:
        raise Unpickled(f"unpickled in this test: {', '.join(found)}")
