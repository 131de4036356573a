"""A part of an engine that is opened on first use, once, by whichever thread asks first."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")


class opened(cached_property[T]):
    """A part opened by the first thread that asks for it, while others who ask wait.

    ``functools.cached_property`` alone lets two threads open it twice since Python 3.12. Each part
    has a lock of its own: a loading model keeps nobody from the tokenizer or the corpus.
    """

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        with instance._opening(self.attrname):
            return super().__get__(instance, owner)


class OpenedParts:
    """Base of what has :class:`opened` parts."""

    def __init__(self) -> None:
        self._locks: dict[str, threading.RLock] = {}

    def _opening(self, part: str) -> threading.RLock:
        return self._locks.setdefault(part, threading.RLock())
