"""Names of people, dealt to splits so that none is ever in two of them.

Owns: the words that names are made of and the rule that sends a name to a split. Does not know:
documents, questions, the tokenizer. All splits share the words, each of them one token of the demo
tokenizer; a held-out name is a pair of words that was never met together. A small model binds names
of one token first.
"""

import itertools
import random
import tomllib
import zlib
from pathlib import Path
from typing import Literal, get_args

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

_WORDS: dict[str, tuple[str, ...]] = {
    key: tuple(words.split())
    for key, words in tomllib.loads(
        Path(__file__).with_name("names.toml").read_text(encoding="utf-8")
    ).items()
}
FEMALE, MALE, SURNAMES = _WORDS["female"], _WORDS["male"], _WORDS["surnames"]


def split_of(name: str) -> Split:
    """The one split in which `name` ("given surname") may be: 7 of 10 train, 1 validates, 2 test."""
    bucket = zlib.crc32(name.encode()) % 10
    return "train" if bucket < 7 else "validation" if bucket < 8 else "test"


class NameDealer:
    """Deals names of one split, no word twice until a pool is empty. Not thread-safe."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")
        self._rng = rng
        self._split: Split = split
        self._used: set[str] = set()

    def person(self, gender: str) -> str:
        """A name of that gender (`female` or `male`) whose words were not dealt yet."""
        given_names = FEMALE if gender == "female" else MALE
        for tries in itertools.count():
            if tries and tries % 50 == 0:  # what is left of the pools makes no name of this split
                self._used.clear()
            given, surname = self._fresh(given_names), self._fresh(SURNAMES)
            if split_of(f"{given} {surname}") == self._split:
                break
        self._used |= {given, surname}
        return f"{given} {surname}"

    def _fresh(self, words: tuple[str, ...]) -> str:
        left = [word for word in words if word not in self._used]
        if len(left) * 10 < len(words):  # nearly dealt out: words repeat rather than names run out
            self._used.difference_update(words)
            left = list(words)
        return self._rng.choice(left)
