"""Records of a text file: a JSON list, or one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blendrag.errors import InvalidInputError

Record = Mapping[str, Any]


def records_in(text: str, file: str, expected: str) -> list[Record]:
    """The records of a file whose text that is; ``file`` names it in errors. Raises
    :class:`InvalidInputError`, which says what was ``expected``."""
    is_list = text.lstrip().startswith("[")
    found: list[Record] = []
    # Not splitlines: strings may contain U+2028 unescaped.
    for number, part in enumerate([text] if is_list else text.split("\n"), 1):
        if not part.strip():
            continue
        try:
            value = json.loads(part)
        except (ValueError, RecursionError) as exc:
            line = number + exc.lineno - 1 if isinstance(exc, json.JSONDecodeError) else number
            raise InvalidInputError(
                f"line {line} of {file} is not JSON ({exc}); expected {expected}"
            ) from exc
        found += value if is_list else [value]
    for number, record in enumerate(found, 1):
        if not isinstance(record, Mapping):
            raise InvalidInputError(
                f"record {number} of {file} is of type {type(record).__name__}, expected {expected}"
            )
    return found
