"""Options that hold several values: names, ratios and schedules between commas.

Owns how such a text is taken apart. What the names mean is looked up elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from blendrag.errors import InvalidInputError


def listed(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def schedules(texts: Sequence[str] | None) -> list[str]:
    """Names of schedules between commas; numbers between commas are one vector."""
    found: list[str] = []
    for text in texts or ():
        parts = listed([text.partition(":")[2] if text.startswith("calibrated:") else text])
        is_vector = len(parts) > 1 and all(map(is_number, parts))
        found += [text] if is_vector else listed([text])
    return found


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def ratio(text: str) -> float:
    if not is_number(text):
        raise InvalidInputError(f"ratio {text!r} is no number, expected one in [0, 1]")
    return float(text)


def is_on(text: str) -> bool:
    if text not in ("on", "off"):
        raise InvalidInputError(f"--encode-prefix {text!r} is not on, off or on,off")
    return text == "on"
