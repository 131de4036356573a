"""Options that hold several values: names, ratios and schedules between commas.

Owns how such a text is taken apart. What the names mean is looked up elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from blendrag.errors import InvalidInputError


def listed(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def given(option: str, texts: Sequence[str] | None) -> list[str]:
    """What ``option`` lists; nothing where it is left out.

    Raises :class:`InvalidInputError` where it is there and lists nothing (an unset variable of a
    script, say): whoever names it does not want the default.
    """
    return _something(option, texts, listed(texts or ()))


def _something(option: str, texts: Sequence[str] | None, found: list[str]) -> list[str]:
    if texts and not found:
        shown = " ".join(f"{option} {text!r}" for text in texts)
        raise InvalidInputError(f"{shown} names none; name one, or leave the option out")
    return found


def schedules(texts: Sequence[str] | None) -> list[str]:
    """Names of schedules between commas; numbers between commas are one vector.

    Raises as :func:`given` does.
    """
    found: list[str] = []
    for text in texts or ():
        parts = listed([text.partition(":")[2] if text.startswith("calibrated:") else text])
        is_vector = len(parts) > 1 and all(map(is_number, parts))
        found += [text] if is_vector else listed([text])
    return _something("--schedules", texts, found)


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
