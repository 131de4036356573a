"""Fail tests in which anything is unpickled.

``pickle.load``, ``pickle.loads``, ``pickle.Unpickler`` and ``torch.load`` without ``weights_only`` are
replaced. Code that bound them earlier is caught by the audit event ``pickle.find_class``, which CPython
raises for every global that a pickle names. What was caught is recorded, as a library may swallow the
exception. An audit hook cannot be removed; it does nothing while the trap is not armed.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

_caught: list[str] = []
_armed = _hears = False


class Unpickled(Exception):
    """Something was about to be unpickled."""


def _refuse(what: str) -> NoReturn:
    _caught.append(what)
    raise Unpickled(f"{what} was about to unpickle; nothing in this project may")


def _refusing(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """``real`` while the trap is not armed, for libraries that bind a net."""
    return lambda *args, **kwargs: _refuse(what) if _armed else real(*args, **kwargs)


class _Unpickler(pickle.Unpickler):
    """A class, so that libraries can derive from it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _armed:
            _refuse("pickle.Unpickler")
        super().__init__(*args, **kwargs)


_torch_load = torch.load


def _load_weights(*args: Any, **kwargs: Any) -> Any:
    if kwargs.get("weights_only", True) is not True:
        _refuse("torch.load without weights_only")
    return _torch_load(*args, **{**kwargs, "weights_only": True})


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if _armed and event == "pickle.find_class":
        _refuse(f"the global {args[0]}.{args[1]} of a pickle")


_NETS: tuple[tuple[Any, str, Any, Any], ...] = (
    (pickle, "load", pickle.load, _refusing("pickle.load", pickle.load)),
    (pickle, "loads", pickle.loads, _refusing("pickle.loads", pickle.loads)),
    (pickle, "Unpickler", pickle.Unpickler, _Unpickler),
    (torch, "load", _torch_load, _load_weights),
)


def arm() -> None:
    """Set the trap for this process and its forks."""
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
    """For a test of pickling itself."""
    before = _armed
    _set(False)
    try:
        yield
    finally:
        _set(before)


def caught() -> list[str]:
    """What was caught since the last call."""
    found = _caught.copy()
    _caught.clear()
    return found


def check() -> None:
    """Fail if anything was caught since the last check."""
    if found := caught():
        raise Unpickled(f"unpickled in this test: {', '.join(found)}")
