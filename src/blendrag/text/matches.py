"""What counts as a match of a chunk in a prompt, and which of overlapping matches are kept.

A match lies in a searched part of the prompt (a message's content), begins and ends at word boundaries
and has at least :data:`MIN_LETTERS` letters or digits. English prose carries about one bit per character
(Shannon 1951), so 45 letters, about ten words, carry 54 bits: with a million chunks, a prompt of 32,000
characters contains one of them by chance once in half a million prompts. Ideographs, kana and Hangul
syllables count three each. Rules and tables of punctuation alone never match.
"""

from __future__ import annotations

import bisect
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MIN_LETTERS = 45
#: Letters that one wide character (ideograph, kana, Hangul syllable) counts as.
WIDE_LETTERS = 3

#: First words of the Unicode names of characters in scripts that put no space between words.
_UNSPACED = frozenset(
    {
        "CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "HALFWIDTH", "BOPOMOFO", "YI", "NUSHU", "TANGUT",
        "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE", "BALINESE", "TAI", "NEW",
    }
)  # fmt: skip
#: Bits of a character's kind: its letters (0, 1 or 3), and whether it is part of a word.
_LETTERS, _JOINS = 3, 4
_ESCAPED = [ord(char) for char in "ntr"]


@dataclass(frozen=True)
class Match:
    """A chunk's text at ``prompt[start:end]``, from its character ``head`` on.

    ``complete`` is False where the chunk is cut: then ``prompt[start:end]`` is only a part of its text.
    """

    chunk_id: str
    start: int
    end: int
    complete: bool
    head: int = 0


@lru_cache(maxsize=1 << 16)
def _kind(char: str) -> int:
    category = unicodedata.category(char)[0]
    if category not in "LNM":
        return 0
    letters = int(category != "M")
    if letters and unicodedata.east_asian_width(char) in "WF":
        letters = WIDE_LETTERS
    spaced = re.split("[ -]", unicodedata.name(char, ""))[0] not in _UNSPACED
    return letters | (_JOINS if spaced else 0)


def letters_in(text: str) -> int:
    """Letters and digits of ``text``; a wide character counts :data:`WIDE_LETTERS`."""
    return sum(count * (_kind(char) & _LETTERS) for char, count in Counter(text).items())


def is_recognisable(text: str) -> bool:
    """Whether a chunk with this text is long enough to be searched for in prompts."""
    return letters_in(text) >= MIN_LETTERS


class SearchArea:
    """The parts of one prompt that are searched."""

    def __init__(
        self, prompt: str, within: Sequence[tuple[int, int]] | None = None, strict: bool = True
    ) -> None:
        """``within``: ascending, disjoint spans; ``None`` for the whole prompt.

        With ``strict=False`` a match needs neither word boundaries nor a minimum length.
        """
        size = len(prompt)
        # The first span is empty, so that every position has a span that starts at or before it.
        spans = np.array([(0, 0), *([(0, size)] if within is None else within)], np.intp)
        self._starts, self._ends = spans[:, 0], spans[:, 1]
        self._least = MIN_LETTERS if strict else 0
        self._letters = np.zeros(size + 1, np.int32)
        self._boundary = np.ones(size + 1, np.bool_)
        if strict and size:
            codes = np.frombuffer(prompt.encode("utf-32-le", "surrogatepass"), np.uint32)
            kinds = _kind_table(prompt)[codes]
            np.cumsum(kinds & _LETTERS, out=self._letters[1:])
            joins = (kinds & _JOINS) > 0
            self._boundary[1:-1] = ~(joins[1:] & joins[:-1])
            # The n of a line break that JSON or repr wrote as \\n belongs to no word.
            self._boundary[2:] |= (codes[:-1] == ord("\\")) & np.isin(codes[1:], _ESCAPED)
            self._boundary[spans] = True

    def ends(self, starts: np.ndarray) -> np.ndarray:
        """For each start, the end of the searched span around it; 0 outside of all spans."""
        ends = self._ends[np.searchsorted(self._starts, starts, "right") - 1]
        return np.where(starts < ends, ends, 0)

    def may_begin(self, starts: np.ndarray) -> np.ndarray:
        """Whether a chunk may begin at each of ``starts``."""
        return self._boundary[starts] & (self.ends(starts) > 0)

    def may_hold(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Whether a whole chunk may fill each span; ``starts`` passed :meth:`may_begin`."""
        ends = starts + lengths
        fits = ends <= self.ends(starts)
        ends = np.where(fits, ends, starts)
        enough = self._letters[ends] - self._letters[starts] >= self._least
        return fits & enough & self._boundary[ends]

    def around(self, place: int) -> tuple[int, int]:
        """The searched span around ``place``; empty outside of all spans."""
        at = int(np.searchsorted(self._starts, place, "right")) - 1
        start, end = int(self._starts[at]), int(self._ends[at])
        return (start, end) if place < end else (place, place)

    def begin(self, start: int, end: int) -> int:
        """The first word boundary in ``prompt[start:end]``."""
        return start + int(np.argmax(self._boundary[start : end + 1]))

    def cut(self, start: int, end: int) -> int:
        """The last word boundary in ``prompt[start:end]``, or ``start`` if too few letters precede it."""
        end = start + int(np.flatnonzero(self._boundary[start : end + 1])[-1])
        return end if self._letters[end] - self._letters[start] >= self._least else start


def _kind_table(prompt: str) -> np.ndarray:
    """Kinds of the prompt's characters, indexed by code point.  uint8"""
    chars = set(prompt)
    table = np.zeros(ord(max(chars)) + 1, np.uint8)
    for char in chars:
        table[ord(char)] = _kind(char)
    return table


def best_cover(matches: Sequence[Match]) -> list[Match]:
    """The disjoint matches that cover most characters together; of equal covers, the one with fewest.

    Weighted interval scheduling, O(n log n).
    """
    ordered = sorted(matches, key=lambda match: (match.end, match.start))
    ends = [match.end for match in ordered]
    scores, before = [0], []  # of the first k matches
    scale = len(ordered) + 1  # one character counts for more than all matches
    for k, match in enumerate(ordered):
        before.append(bisect.bisect_right(ends, match.start, 0, k))
        gain = (match.end - match.start) * scale - 1
        scores.append(max(scores[k], scores[before[k]] + gain))
    chosen, k = [], len(ordered)
    while k:
        if scores[k] == scores[k - 1]:
            k -= 1
        else:
            chosen.append(ordered[k - 1])
            k = before[k - 1]
    return chosen[::-1]


def common_prefix(a: str | tuple[int, ...], b: str | tuple[int, ...]) -> int:
    """Number of characters or ids that both begin with, by comparing slices."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_ESCAPE = re.compile(r"""\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([ntr"'\\/]))""")
_PLAIN = {"n": "\n", "t": "\t", "r": "\r"}


def unescaped(prompt: str) -> str:
    """``prompt`` with the escapes of ``repr`` and JSON replaced by the characters they mean."""

    def plain(escape: re.Match[str]) -> str:
        code = escape[1] or escape[2]
        return chr(int(code, 16)) if code else _PLAIN.get(escape[3], escape[3])

    text, count = _ESCAPE.subn(plain, prompt)
    if not count:
        return prompt
    # JSON writes characters beyond the first plane as two escapes.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
