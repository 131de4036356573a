"""Small JSON records of this machine: gate verdicts, machine profiles, calibrations."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from blendrag.store import records
from blendrag.store.records import MAX_ENTRIES, Records


@pytest.fixture
def kept(tmp_path: Path) -> Records:
    return records.profiles(tmp_path, "ns")


def write(kept: Records, text: str) -> None:
    kept.path.parent.mkdir(parents=True, exist_ok=True)
    kept.path.write_text(text)


def test_an_entry_replaces_those_it_says_and_keeps_the_others_as_they_are(kept: Records) -> None:
    others: list[Any] = [{"version": 1, "odd": [1e999]}, 3, {"deep": [None]}]
    write(kept, json.dumps({"profiles": [*others, {"mine": 1}]}))
    kept.keep({"mine": 2}, lambda entry: isinstance(entry, dict) and "mine" in entry)
    assert kept.entries() == [*others, {"mine": 2}]


def test_the_oldest_entries_go_first(kept: Records) -> None:
    for number in range(MAX_ENTRIES + 2):
        kept.keep({"number": number}, lambda entry: False)
    assert [entry["number"] for entry in kept.entries()] == [*range(2, MAX_ENTRIES + 2)]


def test_the_stamp_changes_with_the_file(kept: Records) -> None:
    stamps = [kept.stamp]
    for _ in range(2):
        kept.keep({}, lambda entry: True)
        stamps.append(kept.stamp)
    assert stamps[0] is None
    assert len(set(stamps)) == 3


def test_a_file_that_is_one_record_is_read_as_one_entry(tmp_path: Path) -> None:
    verdicts = records.verdicts(tmp_path, "ns")
    write(verdicts, '{"verdict": "blendable"}')
    assert verdicts.entries() == [{"verdict": "blendable"}]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"profiles": 3}', "[" * 200_000])
def test_a_damaged_file_is_set_aside_with_a_sentence(
    kept: Records, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(kept, text)
    with caplog.at_level(logging.WARNING):
        assert kept.entries() == []
    assert f"{kept.path} is damaged and is not used" in caplog.text
    assert (kept.path.parent / "ns.profiles.damaged").read_text() == text
    kept.keep({"mine": 1}, lambda entry: False)
    assert kept.entries() == [{"mine": 1}]


@pytest.mark.parametrize("hostile", ["fifo", "zero", "directory", "huge"])
def test_what_is_not_a_small_regular_file_has_no_entries(kept: Records, hostile: str) -> None:
    kept.path.parent.mkdir()
    if hostile == "fifo":
        os.mkfifo(kept.path)
    elif hostile == "zero":
        kept.path.symlink_to("/dev/zero")
    elif hostile == "directory":
        kept.path.mkdir()
    else:
        with kept.path.open("wb") as file:
            file.truncate(1 << 40)
    assert kept.entries() == []
