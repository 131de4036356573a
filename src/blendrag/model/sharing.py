"""One loaded model, used by several engines and by its owner at the same time.

- :func:`loaded_once`: engines of the same name load the model once, and engines over the same weights pack
  them once.
- :func:`lock_of`: one lock per model object. Engines over the same model take turns.
- :func:`only_here`: hooks are on the model, so all its users run them; these act for one user only.
- :func:`before_layers`: such a hook on every decoder layer, to abandon or to pause a forward.
- :func:`replaced`: a method of one module, such as its forward, replaced for a while.

Forwards by others take no lock, and compute what they would without blendrag.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from greenlet import getcurrent
from torch import nn

T = TypeVar("T")

#: How often a waiting thread checks whether it still needs the lock.
CHECK_INTERVAL_S = 0.05


class ModelLock:
    """A reentrant lock that gives waiting threads their turn.

    The thread that releases a plain ``RLock`` can take it again before a waiting thread wakes up. Here it
    must pass ``_door``, which the waiting thread holds until it has the lock.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget the owner: a forked child does not have that thread."""
        self._door, self._held = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self.is_wanted = False
        """Whether another thread waits for it, not in the background."""

    def acquire(self, timeout: float = -1, in_background: bool = False) -> bool:
        """Take the lock; ``False`` after ``timeout`` seconds (-1: no limit).

        ``in_background``: waiting for it does not make it :attr:`is_wanted`. Otherwise two background calls
        would give way to each other for ever.
        """
        if self._owner != threading.get_ident():
            if not self._door.acquire(timeout=timeout):
                return False
            try:
                self.is_wanted = not in_background
                if not self._held.acquire(timeout=timeout):
                    return False
            finally:
                self.is_wanted = False
                self._door.release()
            self._owner = threading.get_ident()
        self._depth += 1
        return True

    def release(self) -> None:
        """Undo one :meth:`acquire`."""
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._held.release()

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Hold the lock for work that nobody waits for."""
        self.acquire(in_background=True)
        try:
            yield
        finally:
            self.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    @contextmanager
    def while_wanted(self, check: Callable[[], None]) -> Iterator[None]:
        """Hold the lock; ``check`` is called while another thread has it, and may raise to give up."""
        while not self.acquire(CHECK_INTERVAL_S):
            check()
        try:
            yield
        finally:
            self.release()


_locks: weakref.WeakKeyDictionary[nn.Module, ModelLock] = weakref.WeakKeyDictionary()
_making = threading.Lock()
_loaded: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
_loading: dict[Hashable, threading.Lock] = {}


def lock_of(model: nn.Module) -> ModelLock:
    """The lock of ``model``, the same for all users of this object."""
    with _making:
        return _locks.setdefault(model, ModelLock())


def loaded_once(key: Hashable, load: Callable[[], T]) -> T:
    """``load()``, or what another caller loaded under this ``key`` and still holds."""
    with _making:
        loading = _loading.setdefault(key, threading.Lock())
    with loading:
        found: T | None = _loaded.get(key)
        if found is None:
            with without_collection():
                found = _loaded[key] = load()
        return found


@contextmanager
def without_collection() -> Iterator[None]:
    """Without Python's garbage collector, which would look at a million new objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_loaded(key: Hashable) -> bool:
    """Whether somebody holds what was loaded under this ``key``."""
    return key in _loaded


def _after_fork() -> None:
    global _making
    _making = threading.Lock()
    _loading.clear()
    _loaded.clear()  # the parent's: its engines refuse to work in a child
    for lock in list(_locks.values()):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def only_here(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook``, which does nothing in other threads and greenlets, and while dynamo traces the module."""
    owner = getcurrent()

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or getcurrent() is not owner:
            return None
        return hook(*args, **kwargs)

    return guarded


def is_given(value: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this very object is among the arguments of a forward."""
    return any(each is value for each in (*args, *kwargs.values()))


_ABSENT = object()


@contextmanager
def replaced(module: nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Within this context ``module`` itself has this ``method`` under that name."""
    own = vars(module).get(name, _ABSENT)
    setattr(module, name, method)
    try:
        yield
    finally:
        if own is _ABSENT:
            vars(module).pop(name, None)
        else:
            setattr(module, name, own)


@contextmanager
def before_layers(
    layers: Sequence[nn.Module], call: Callable[[], None]
) -> Iterator[Callable[[], None]]:
    """Within this context ``call()`` precedes each of ``layers`` in the caller's forwards; it may raise to
    abandon one. The function that the context gives ends that earlier, as hooks slow down all forwards."""
    hook = only_here(lambda *_: call())
    handles = [layer.register_forward_pre_hook(hook) for layer in layers]

    def end() -> None:
        for handle in handles:
            handle.remove()

    try:
        yield end
    finally:
        end()
