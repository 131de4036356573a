"""Errors that LlamaIndex does not turn into an empty answer.

Its synthesizers (0.14) catch every :class:`ValueError` of an LLM, log it where nobody looks, and answer
"Empty Response". :class:`InvalidInputError` is one. What synthesizers call raises the same error without that
base.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from blendrag.errors import InvalidInputError


class _NoValueError(type):
    """Metaclass of errors that ``except ValueError`` does not catch."""

    def mro(cls) -> list[type]:
        return [base for base in super().mro() if base is not ValueError]


@contextmanager
def never_empty() -> Iterator[None]:
    """Errors of the caller's input leave this context as errors that no synthesizer catches."""
    try:
        yield
    except InvalidInputError as exc:
        if not issubclass(type(exc), ValueError):
            raise
        kind = _kind_of(type(exc))  # type: ignore[arg-type]  # mypy has no hash for it
        made = kind.__new__(kind)
        made.args = exc.args
        made.__dict__.update(exc.__dict__)
        raise made from exc


@cache
def _kind_of(kind: type[InvalidInputError]) -> Any:
    """``kind``, for ``except`` of it and of its bases, without :class:`ValueError`."""

    def reduced(self: InvalidInputError) -> Any:
        restore, (_, args), state = kind.__reduce__(self)
        return restore, (kind, args), state

    fields = {
        "__reduce__": reduced,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return _NoValueError(kind.__name__, (kind,), fields)
