"""Limits of values that are lists and dictionaries: tools, and calls of them.

A template shows them as JSON, whose writer is recursive. A value that contains itself has no JSON, and one
whose parts are shared many times has a very long one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from blendrag.errors import InvalidInputError, check_unicode

#: Most values inside one another. The schemas of real tools are ten deep.
MAX_DEPTH = 128
#: Most values in all.
MAX_VALUES = 1_000_000


def check_nested(value: Any, name: str) -> None:
    """Raise :class:`InvalidInputError` for a value ``name`` that is too deep or large, or has no JSON."""
    waiting, seen = [(value, 1)], 0
    while waiting:
        each, depth = waiting.pop()
        seen += 1
        if depth > MAX_DEPTH:
            raise InvalidInputError(
                f"{name} is nested more than {MAX_DEPTH} deep, or contains itself; flatten it"
            )
        if isinstance(each, Mapping):
            waiting += ((part, depth + 1) for pair in each.items() for part in pair)
        elif isinstance(each, list | tuple):
            waiting += ((part, depth + 1) for part in each)
        elif isinstance(each, str):
            check_unicode(each, name)
        elif isinstance(each, float) and not math.isfinite(each):
            raise InvalidInputError(f"{name} holds {each}, which JSON has not; leave it out")
        if seen + len(waiting) > MAX_VALUES:
            raise InvalidInputError(
                f"{name} holds more than {MAX_VALUES} values; describe it in fewer"
            )
