"""Signatures that show every keyword.

``**given: Unpack[SomeTypedDict]`` tells type checkers and editors which keywords a function takes;
:func:`shows` also writes them into its signature, for ``help()``, notebooks and the reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def shows(keywords: type, defaults: object = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: the keys of the ``TypedDict`` instead of ``**given``; attributes of ``defaults`` are their
    default values, else ``None``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shown = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(defaults, name, None),
                annotation=getattr(annotation, "__forward_arg__", annotation),
            )
            for name, annotation in keywords.__annotations__.items()
        ]
        made = signature.replace(parameters=[*own, *shown])
        function.__signature__ = made  # type: ignore[attr-defined]
        return function

    return decorate
