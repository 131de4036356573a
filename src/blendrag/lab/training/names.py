"""Names of entities, dealt to splits so that none is ever in two of them.

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

from blendrag.lab.training.facts import SPLITS, Split

WORDS: dict[str, tuple[str, ...]] = {
    key: tuple(words.split())
    for key, words in tomllib.loads(
        Path(__file__).with_name("names.toml").read_text(encoding="utf-8")
    ).items()
}


def split_of(name: str) -> Split:
    """The one split in which `name` ("first second") may be: 7 of 10 train, 1 validates, 2 test."""
    bucket = zlib.crc32(name.encode()) % 10
    return "train" if bucket < 7 else "validation" if bucket < 8 else "test"


def gender_of(name: str) -> str:
    """`female` or `male`, by the given name of a person."""
    return "female" if name.split(" ", 1)[0] in WORDS["female"] else "male"


class NameDealer:
    """Deals names of one split, no word twice until a pool is nearly empty. Not thread-safe."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")
        self._rng = rng
        self.split: Split = split
        self._used: dict[str, set[str]] = {}

    def name(self, kind: str) -> str:
        """A name for an entity of `kind`; its words were not dealt yet, as far as they reach."""
        if kind == "person":
            return self._pair(self._rng.choice(("female", "male")), "surnames")
        return self._pair(f"{kind}_first", f"{kind}_second")

    def _pair(self, first: str, second: str) -> str:
        for tries in itertools.count():
            if tries and tries % 50 == 0:  # what is left of the pools makes no name of this split
                self._used.clear()
            words = self._fresh(first), self._fresh(second)
            if split_of(" ".join(words)) == self.split:
                break
        for pool, word in zip((first, second), words, strict=True):
            self._used.setdefault(pool, set()).add(word)
        return " ".join(words)

    def _fresh(self, pool: str) -> str:
        words, used = WORDS[pool], self._used.get(pool, set())
        left = [word for word in words if word not in used]
        if len(left) * 10 < len(words):  # nearly dealt out: words repeat rather than names run out
            used.clear()
            left = list(words)
        return self._rng.choice(left)
