"""What generated documents can say: names, attributes and phrases, read from TOML files.

Names and pairs of opener and statement are dealt to the splits, so that none is in two of them. All
splits share the words: a held-out name is a pair of words that never occurred together in training.
"""

import itertools
import random
import tomllib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class Attribute:
    """One thing to say about an entity; `to` is the kind of entity that a link leads to."""

    key: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    comparisons: tuple[str, ...] = ()
    to: str = ""
    path: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of entity: its introductions, roles, filler sentences and attributes."""

    name: str
    introductions: tuple[str, ...]
    roles: tuple[str, ...]
    fillers: tuple[str, ...]
    attributes: tuple[Attribute, ...]

    @property
    def plain(self) -> tuple[Attribute, ...]:
        """Attributes that are not links."""
        return tuple(a for a in self.attributes if not a.to)


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def _attribute(record: Mapping[str, Any]) -> Attribute:
    values: str = record.get("values", "")
    if values.startswith("$"):
        values = _SHARED[values[1:]]
    lists = {name: tuple(value) for name, value in record.items() if isinstance(value, list)}
    return Attribute(**{**record, **lists, "values": tuple(values.split())})


_RECORDS = _read("facts.toml")
_SHARED: dict[str, str] = _RECORDS.pop("shared")
_PHRASES: dict[str, list[str]] = _RECORDS.pop("phrases")
ALIASES: tuple[str, ...] = tuple(_SHARED["aliases"].split())
OPENERS: tuple[str, ...] = tuple(_PHRASES["openers"])
TIMES: tuple[str, ...] = tuple(_PHRASES["times"])
KINDS: dict[str, Kind] = {
    name: Kind(
        name,
        tuple(record["introductions"]),
        tuple(record["roles"].split()),
        tuple(record["fillers"]),
        tuple(_attribute(attribute) for attribute in record["attributes"]),
    )
    for name, record in _RECORDS.items()
}
#: Words of names by pool; each is one token of the demo tokenizer, as a small model binds those first.
WORDS: dict[str, tuple[str, ...]] = {
    pool: tuple(words.split()) for pool, words in _read("names.toml").items()
}


def openers(statement: str, split: Split) -> tuple[str, ...]:
    """The openers that `split` may put before `statement`: four of six for training, one for
    validation, one for the test. They differ by statement, so every word is known and the pair is new.
    """
    turn = zlib.crc32(statement.encode())
    of = {"train": (0, 1, 2, 3), "validation": (4,), "test": (5,)}[split]
    return tuple(OPENERS[(turn + i) % len(OPENERS)] for i in of)


def split_of(name: str) -> Split:
    """The split of `name` ("first second"): 7 of 10 train, 1 validates, 2 test."""
    bucket = zlib.crc32(name.encode()) % 10
    return "train" if bucket < 7 else "validation" if bucket < 8 else "test"


def gender_of(name: str) -> str:
    """`female` or `male`, by the given name of a person."""
    return "female" if name.split(" ", 1)[0] in WORDS["female"] else "male"


class NameDealer:
    """Deals names of one split; words repeat only when a pool is nearly empty. Not thread-safe."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")
        self._rng = rng
        self.split: Split = split
        self._used: dict[str, set[str]] = {}

    def name(self, kind: str) -> str:
        """A name for an entity of `kind`."""
        if kind == "person":
            return self._pair(self._rng.choice(("female", "male")), "surnames")
        return self._pair(f"{kind}_first", f"{kind}_second")

    def _pair(self, first: str, second: str) -> str:
        for tries in itertools.count():
            if tries and tries % 50 == 0:  # the words left make no name of this split
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
        if len(left) * 10 < len(words):
            used.clear()
            left = list(words)
        return self._rng.choice(left)
