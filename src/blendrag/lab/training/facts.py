"""What documents can say about each kind of entity: `KINDS`, read from `facts.toml` beside this
file.

Owns: the form of that file and of its sentences, and which opener a split may put before which
statement. Does not know: names, documents.
"""

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
    """A kind of entity: how it is introduced, which roles it has, what can be said of it."""

    name: str
    introductions: tuple[str, ...]
    roles: tuple[str, ...]
    fillers: tuple[str, ...]
    attributes: tuple[Attribute, ...]

    @property
    def plain(self) -> tuple[Attribute, ...]:
        return tuple(a for a in self.attributes if not a.to)


def _attribute(record: Mapping[str, Any], shared: Mapping[str, str]) -> Attribute:
    values: str = record.get("values", "")
    if values.startswith("$"):
        values = shared[values[1:]]
    return Attribute(
        record["key"],
        tuple(values.split()),
        tuple(record["statements"]),
        tuple(record["questions"]),
        tuple(record.get("comparisons", ())),
        record.get("to", ""),
        record.get("path", ""),
    )


_RECORDS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("facts.toml").read_text(encoding="utf-8")
)
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
        tuple(_attribute(attribute, _SHARED) for attribute in record["attributes"]),
    )
    for name, record in _RECORDS.items()
}


def openers(statement: str, split: Split) -> tuple[str, ...]:
    """The openers that `split` may put before `statement`: of six, four train, one validates, one
    tests; another four for another statement, so that every word is known and the pair is new.
    """
    turn = zlib.crc32(statement.encode())
    of = {"train": (0, 1, 2, 3), "validation": (4,), "test": (5,)}[split]
    return tuple(OPENERS[(turn + i) % len(OPENERS)] for i in of)
