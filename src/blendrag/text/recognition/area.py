"""Where in a prompt a chunk may stand: in message contents, between whole words, long enough.

Owns what counts as a word boundary and how much text a match needs. All answers are array look-ups, so
that a prompt of 25,000 characters costs a millisecond.

A match needs :data:`MIN_LETTERS` letters or digits. English prose carries about one bit a character
(Shannon 1951), so 45 letters, ten words with their spaces, carry 54 bits: a million chunks stand in a
prompt of 32,000 characters by chance once in half a million prompts. Ideographs, kana and Hangul
syllables count three each. Rules and tables of punctuation alone are never matched.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
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
#: Bits of a character's kind: its letters (0, 1 or 3), and whether it is in a word.
_LETTERS, _JOINS = 3, 4
_ESCAPED = [ord(char) for char in "ntr"]
_FIRST_WORD = re.compile("[A-Z]+")


@lru_cache(maxsize=1 << 16)
def _kind(char: str) -> int:
    category = unicodedata.category(char)[0]
    if category not in "LNM":
        return 0
    letters = int(category != "M")
    if letters and unicodedata.east_asian_width(char) in "WF":
        letters = WIDE_LETTERS
    name = _FIRST_WORD.match(unicodedata.name(char, ""))
    spaced = name is None or name[0] not in _UNSPACED
    return letters | (_JOINS if spaced else 0)


def letters_in(text: str) -> int:
    """Letters and digits of ``text``, wide ones counted :data:`WIDE_LETTERS` times."""
    return sum(_kind(char) & _LETTERS for char in text)


def is_recognisable(text: str) -> bool:
    """Whether a chunk of this text is long enough to be looked for in prompts."""
    return letters_in(text) >= MIN_LETTERS


class SearchArea:
    """The parts of one prompt that are searched."""

    def __init__(
        self, prompt: str, within: Sequence[tuple[int, int]] | None = None, strict: bool = True
    ) -> None:
        """``within``: ascending, disjoint spans; ``None`` for all of the prompt.

        ``strict=False`` asks for neither word boundaries nor length.
        """
        size = len(prompt)
        spans = np.array([(0, size)] if within is None else list(within), np.intp).reshape(-1, 2)
        self._starts, self._ends = spans[:, 0], spans[:, 1]
        self._least = MIN_LETTERS if strict else 0
        self._letters = np.zeros(size + 1, np.int32)
        self._boundary = np.ones(size + 1, np.bool_)
        if strict and size:
            codes = np.frombuffer(prompt.encode("utf-32-le", "surrogatepass"), np.uint32)
            kinds = _kinds(prompt)[codes]
            np.cumsum(kinds & _LETTERS, out=self._letters[1:])
            joins = (kinds & _JOINS) > 0
            self._boundary[1:-1] = ~(joins[1:] & joins[:-1])
            # The n of a line break that JSON or repr wrote as \\n is in no word.
            self._boundary[2:] |= (codes[:-1] == ord("\\")) & np.isin(codes[1:], _ESCAPED)
            self._boundary[spans] = True

    def ends(self, starts: np.ndarray) -> np.ndarray:
        """For each start, where the searched span ends that it is in; 0 outside of them."""
        if not len(self._starts):
            return np.zeros(len(starts), np.intp)
        at = np.searchsorted(self._starts, starts, "right") - 1
        ends = self._ends[at]
        return np.where((at >= 0) & (starts < ends), ends, 0)

    def may_begin(self, starts: np.ndarray) -> np.ndarray:
        """Which of ``starts`` a chunk may begin at."""
        return self._boundary[starts] & (self.ends(starts) > 0)

    def may_hold(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Which of the spans a whole chunk may fill; starts as :meth:`may_begin` left them."""
        ends = starts + lengths
        fits = ends <= self.ends(starts)
        ends = np.where(fits, ends, starts)
        enough = self._letters[ends] - self._letters[starts] >= self._least
        return fits & enough & self._boundary[ends]

    def cut(self, start: int, end: int) -> int:
        """The last word boundary in ``prompt[start:end]``; ``start`` where too little is before it."""
        end = start + int(np.flatnonzero(self._boundary[start : end + 1])[-1])
        return end if self._letters[end] - self._letters[start] >= self._least else start


def _kinds(prompt: str) -> np.ndarray:
    """Kinds of the prompt's characters, by code point.  uint8"""
    chars = set(prompt)
    table = np.zeros(ord(max(chars)) + 1, np.uint8)
    for char in chars:
        table[ord(char)] = _kind(char)
    return table
