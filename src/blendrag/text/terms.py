"""Words of a text as full-text search compares them, in any language.

- Case and diacritics are folded: Zürich, zurich; Straße, strasse.
- Ideographs, kana, Hangul, Thai, Lao, Khmer and Burmese, which are written without spaces or with endings
  joined to words, become pairs of neighbouring characters; the index has the single ones as well.
- An identifier becomes its parts and, as one word, all of it: ERR_42-7 becomes err, 42, 7 and err427;
  getUserName becomes get, user, name and getusername, and so is found as get_user_name, too.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

#: Changes with what :func:`terms_of` gives for any text: an index of another version is built again.
TERMS_VERSION = 1
#: Longest term; longer words, as in encoded data, are cut.
MAX_TERM_CHARS = 64
#: Most parts of a word between letters and digits or small and capital letters; keys and digests have more,
#: and then the parts mean nothing.
MAX_PARTS = 8

#: Scripts whose text is cut into pairs of characters.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7a3\uf900-\ufaff\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
#: Vowel signs of Indic scripts, which follow a letter.
_SIGNS = "\u0900-\u0963\u0970-\u0dff"
_WORD = rf"[^\W_{_UNSPACED}](?:[^\W_{_UNSPACED}]|[{_SIGNS}])*"
#: A run of an unspaced script, or words that signs join.
_TOKEN = re.compile(rf"(?P<run>[{_UNSPACED}]+)|{_WORD}(?:(?:[-.:/\\@'’+&#]|_+|::){_WORD})*")
_WORDS = re.compile(_WORD)
#: Parts of getHTTPServer2.
_PARTS = re.compile(rf"[A-Z]+(?=[A-Z][a-z])|[A-Z]?(?:[^\W\d_A-Z]|[{_SIGNS}])+|[A-Z]+|\d+")
#: Marks that are no letters: accents, vowel signs of Arabic and Hebrew. Those of Indic scripts are.
_MARKS = re.compile(
    "[\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u1ab0-\u1aff\u1dc0-\u1dff]"
)
_PLAIN = str.maketrans(
    {"ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D", "ð": "d", "Ð": "D", "ı": "i",
     "æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "þ": "th", "Þ": "Th"}
)  # fmt: skip


def terms_of(text: str) -> list[str]:
    """All terms under which a text is found, in their order."""
    return [*_terms(text, True)]


def query_terms(text: str) -> list[str]:
    """The different terms of a question: of runs without spaces the pairs only."""
    return [*dict.fromkeys(_terms(text, False))]


def _terms(text: str, with_single: bool) -> Iterator[str]:
    for match in _TOKEN.finditer(_folded(text)):
        if match["run"]:
            yield from _pairs(match["run"], with_single)
        else:
            # long ones do not come again, and would fill the memory of the cache
            parts = _parts if len(match[0]) <= MAX_TERM_CHARS else _parts.__wrapped__
            yield from parts(match[0])


def _folded(text: str) -> str:
    """The text without diacritics and variants of characters, such as full-width letters."""
    if text.isascii():
        return text
    plain = _MARKS.sub("", unicodedata.normalize("NFKD", text)).translate(_PLAIN)
    return unicodedata.normalize("NFC", plain)


def _pairs(run: str, with_single: bool) -> Iterator[str]:
    if with_single or len(run) == 1:
        yield from run
    for at in range(len(run) - 1):
        yield run[at : at + 2]


@lru_cache(maxsize=1 << 16)
def _parts(token: str) -> tuple[str, ...]:
    """Terms of words that signs join: the parts of each, each, and all as one."""
    words = _WORDS.findall(token)
    found: list[str] = []
    for word in words:
        parts = _PARTS.findall(word)
        if 1 < len(parts) <= MAX_PARTS:
            found += parts
        found.append(word)
    if len(words) > 1:
        found.append("".join(words))
    return tuple(dict.fromkeys(term.casefold()[:MAX_TERM_CHARS] for term in found))
