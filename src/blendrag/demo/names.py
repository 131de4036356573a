"""Names of people, companies and towns, dealt to splits so that none is ever in two of them.

Owns: the word parts that names are built from and the rule that sends a word to a split. Does not
know: documents, questions, the tokenizer. Words are composed of parts that all splits share, so
that a held-out name is new as a word and yet made of pieces that a tokenizer trained on the other
names can spell.
"""

import random
import tomllib
import zlib
from functools import cache
from pathlib import Path
from typing import Literal, get_args

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

_PARTS: dict[str, tuple[str, ...]] = {
    key: tuple(words.split())
    for key, words in tomllib.loads(
        Path(__file__).with_name("names.toml").read_text(encoding="utf-8")
    ).items()
}
GIVEN_STARTS, SURNAME_STARTS = _PARTS["given_starts"], _PARTS["surname_starts"]
FEMALE_ENDS, MALE_ENDS = _PARTS["female_ends"], _PARTS["male_ends"]
SURNAME_ENDS = _PARTS["surname_ends"]
TOWN_STARTS, TOWN_ENDS = _PARTS["town_starts"], _PARTS["town_ends"]
SECTORS = _PARTS["sectors"]
NAME_PARTS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (GIVEN_STARTS, FEMALE_ENDS),
    (GIVEN_STARTS, MALE_ENDS),
    (SURNAME_STARTS, SURNAME_ENDS),
    (TOWN_STARTS, TOWN_ENDS),
)


def split_of(word: str) -> Split:
    """The one split in which `word` may be (part of) a name: 7 of 10 words train, 1 validates, 2
    test.
    """
    bucket = zlib.crc32(word.encode()) % 10
    return "train" if bucket < 7 else "validation" if bucket < 8 else "test"


@cache
def _words(kind: str, split: Split) -> tuple[str, ...]:
    starts, ends = {
        "female": (GIVEN_STARTS, FEMALE_ENDS),
        "male": (GIVEN_STARTS, MALE_ENDS),
        "surname": (SURNAME_STARTS, SURNAME_ENDS),
        # A company's root must not be someone's surname or a town: that would be a shared name.
        "root": (TOWN_STARTS, SURNAME_ENDS),
        "town": (TOWN_STARTS, TOWN_ENDS),
    }[kind]
    words = sorted({start + end for start in starts for end in ends if start.lower() != end})
    return tuple(word for word in words if split_of(word) == split)


@cache
def given_names(gender: str, split: Split) -> tuple[str, ...]:
    """Given names of one gender; a word both endings produce belongs to the female list."""
    words = _words(gender, split)
    taken = frozenset(_words("female", split)) if gender == "male" else frozenset()
    return tuple(word for word in words if word not in taken)


class NameDealer:
    """Deals names of one split, no word twice until a pool is empty. Not thread-safe."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")
        self._rng = rng
        self._split: Split = split
        self._used: set[str] = set()

    def person(self, gender: str) -> str:
        return f"{self.given(gender)} {self._fresh(_words('surname', self._split))}"

    def given(self, gender: str) -> str:
        return self._fresh(given_names(gender, self._split))

    def company(self) -> str:
        return f"{self._fresh(_words('root', self._split))} {self._rng.choice(SECTORS)}"

    def town(self) -> str:
        return self._fresh(_words("town", self._split))

    def _fresh(self, words: tuple[str, ...]) -> str:
        for _ in range(50):
            word = self._rng.choice(words)
            if word not in self._used:
                break
        else:  # the pool is nearly dealt out: names may repeat rather than the generator stop
            self._used.difference_update(words)
        self._used.add(word)
        return word
