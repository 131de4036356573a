"""What documents can say about each kind of entity: `KINDS`, read from `facts.toml` beside this
file.

Owns: the form of that file and of its sentences. Does not know: names, documents, splits.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Attribute:
    """One thing to say about an entity."""

    key: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of entity: how it is introduced, which roles it has, what can be said of it."""

    name: str
    introductions: tuple[str, ...]
    roles: tuple[str, ...]
    role_questions: tuple[str, ...]
    fillers: tuple[str, ...]
    attributes: tuple[Attribute, ...]


def _attribute(record: Mapping[str, Any], shared: Mapping[str, str]) -> Attribute:
    values: str = record["values"]
    if values.startswith("$"):
        values = shared[values[1:]]
    return Attribute(
        record["key"],
        tuple(values.split()),
        tuple(record["statements"]),
        tuple(record["questions"]),
    )


def _read(path: Path) -> dict[str, Kind]:
    records = tomllib.loads(path.read_text(encoding="utf-8"))
    shared = records.pop("shared")
    return {
        name: Kind(
            name,
            tuple(record["introductions"]),
            tuple(record["roles"]),
            tuple(record["role_questions"]),
            tuple(record["fillers"]),
            tuple(_attribute(attribute, shared) for attribute in record["attributes"]),
        )
        for name, record in records.items()
    }


KINDS: dict[str, Kind] = _read(Path(__file__).with_name("facts.toml"))
