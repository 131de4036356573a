"""The part of each passage that has most of a question's words, for lists of what was found."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

from blendrag.text.terms import query_terms, terms_of

#: A line or a sentence.
_UNIT = re.compile(r"\S[^\n]*?(?:[.!?]['\"”’)\]]*(?=\s)|[。！？]|$)", re.MULTILINE)
_WORD = re.compile(r"\S+")


def excerpts(texts: Sequence[str], question: str, limit_chars: int) -> list[str]:
    """At most ``limit_chars`` of each text on one line, from the line or sentence on that has most of the
    terms of ``question``; of a text without any, the beginning.

    Terms in fewer lines and sentences of ``texts`` weigh more.
    """
    wanted = set(query_terms(question))
    units = [text[start:end] for text in texts for start, end in _units(text)]
    seen = Counter(term for unit in units for term in wanted.intersection(terms_of(unit)))

    def weight(part: str) -> float:
        found = seen.keys() & terms_of(part)
        return math.fsum(math.log1p(len(units) / seen[term]) for term in found)

    return [_excerpt(text, weight, limit_chars) for text in texts]


def _units(text: str) -> list[tuple[int, int]]:
    return [found.span() for found in _UNIT.finditer(text)]


def _excerpt(text: str, weight: Callable[[str], float], limit_chars: int) -> str:
    start, end = max(_units(text), key=lambda unit: weight(text[slice(*unit)]), default=(0, 0))
    begin, room = start, limit_chars - len("… …")
    if weight(text[start : min(start + room, end)]) < weight(text[start:end]):
        words, lead = [*_WORD.finditer(text, start, end)], room // 4
        found = [word.start() for word in words if weight(word[0])]
        first = max(found, key=lambda at: weight(text[at : min(at + room - lead, end)]))
        begin = next(word.start() for word in words if word.start() >= first - lead)
    shown = "… " * (begin > start) + " ".join(text[begin:].split())
    if len(shown) <= limit_chars:
        return shown
    shown = shown[: limit_chars - len(" …")]
    at_word = shown.rfind(" ", limit_chars // 2)  # text without spaces is cut anywhere
    return f"{shown[:at_word] if at_word > 0 else shown} …"
