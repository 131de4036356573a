"""Small JSON records of a store: machine profiles and calibrations."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from blendrag.store.records import MAX_ENTRIES, Records


@dataclass(frozen=True)
class Figure:
    machine: str
    seconds: float


@pytest.fixture
def kept(tmp_path: Path) -> Records[Figure]:
    return Records(tmp_path, "ns.figures", "figures", Figure, ("machine",))


def write(kept: Records[Figure], text: str) -> None:
    kept.path.parent.mkdir(parents=True, exist_ok=True)
    kept.path.write_text(text)


def test_an_entry_replaces_its_own_and_others_stay_as_they_are(kept: Records[Figure]) -> None:
    others: list[Any] = [{"version": 1, "odd": [1e999]}, 3, {"machine": "b", "seconds": "x"}]
    write(kept, json.dumps({"figures": [*others, {"machine": "a", "seconds": None}]}))
    assert kept.entries() == []
    kept.keep(Figure("a", 2.0))
    assert kept.entries() == [Figure("a", 2.0)]
    assert kept.unchecked() == [*others, {"machine": "a", "seconds": 2.0}]


def test_the_oldest_entries_go_first(kept: Records[Figure]) -> None:
    write(kept, json.dumps({"figures": [{"number": i} for i in range(MAX_ENTRIES)]}))
    kept.keep(Figure("a", 1.0))
    numbers = [entry.get("number") for entry in kept.unchecked()]
    assert numbers == [*range(1, MAX_ENTRIES), None]


def test_the_stamp_changes_with_the_file(kept: Records[Figure]) -> None:
    stamps = [kept.stamp]
    for seconds in (1.0, 2.0):
        kept.keep(Figure("a", seconds))
        stamps.append(kept.stamp)
    assert stamps[0] is None
    assert len(set(stamps)) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"figures": 3}', "[" * 200_000])
def test_a_damaged_file_is_set_aside_with_a_sentence(
    kept: Records[Figure], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(kept, text)
    with caplog.at_level(logging.WARNING):
        assert kept.entries() == []
    assert f"{kept.path} is damaged and is not used" in caplog.text
    assert (kept.path.parent / "ns.figures.damaged").read_text() == text
    kept.keep(Figure("a", 1.0))
    assert kept.entries() == [Figure("a", 1.0)]


def test_what_is_not_a_regular_file_has_no_entries(kept: Records[Figure]) -> None:
    kept.path.parent.mkdir()
    os.mkfifo(kept.path)
    assert kept.entries() == []
