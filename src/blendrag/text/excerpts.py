"""The part of each passage that has most of a question's words, for lists of what was found."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from blendrag.text.tables import tables_of
from blendrag.text.terms import query_terms, terms_of

#: A line or a sentence.
_UNIT = re.compile(r"\S[^\n]*?(?:[.!?]['\"”’)\]]*(?=\s)|[。！？]|$)", re.MULTILINE)
_WORD = re.compile(r"\S+")


class Passage(Protocol):
    """A text, and the name of the file it comes from."""

    @property
    def text(self) -> str: ...

    @property
    def source(self) -> str: ...


def excerpts(passages: Sequence[Passage], question: str, limit_chars: int) -> list[str]:
    """At most ``limit_chars`` of each text on one line, from the line or sentence on that has most of the
    terms of ``question``; of a text without any, the beginning. The header of a table comes after its rows.

    Terms in fewer lines and sentences of ``passages`` weigh more.
    """
    wanted = set(query_terms(question))
    units = [each.text[start:end] for each in passages for start, end in _units(each.text)]
    seen = Counter(term for unit in units for term in wanted.intersection(terms_of(unit)))

    def weight(part: str) -> float:
        found = seen.keys() & terms_of(part)
        return math.fsum(math.log1p(len(units) / seen[term]) for term in found)

    return [_excerpt(each, weight, limit_chars) for each in passages]


def _units(text: str) -> list[tuple[int, int]]:
    return [found.span() for found in _UNIT.finditer(text)]


def _best_unit(passage: Passage, weight: Callable[[str], float]) -> tuple[int, int]:
    """A header is the best only if no row of its table has a term: values say more than names of columns."""
    text = passage.text
    weights = {unit: weight(text[slice(*unit)]) for unit in _units(text)}
    for table in tables_of(text, passage.source):
        below = table.rows[0] if table.rows else table.end
        if any(found for (start, _), found in weights.items() if below <= start < table.end):
            weights |= {unit: 0.0 for unit in weights if table.start <= unit[0] < below}
    return max(weights, key=lambda unit: weights[unit], default=(0, 0))


def _excerpt(passage: Passage, weight: Callable[[str], float], limit_chars: int) -> str:
    text = passage.text
    start, end = _best_unit(passage, weight)
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
