"""What is kept of profiles: other versions' entries as they are, damage left out and said to be there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blendrag.planning.profile import VERSION
from blendrag.planning.profile_record import (
    KEPT,
    UNREADABLE,
    Remembered,
    differing,
    path_of,
    recall,
    remember,
)
from planning.invented import CONDITIONS, profile

MINE = profile()
THEIRS = replace(MINE, conditions=replace(CONDITIONS, machine="another"))
LONG = 10**400


def write(root: Path, *entries: Any) -> Path:
    path = path_of(root, CONDITIONS.namespace)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"profiles": entries}))
    return path


def written(root: Path) -> list[Any]:
    entries: list[Any] = json.loads(path_of(root, CONDITIONS.namespace).read_text())["profiles"]
    return entries


@pytest.mark.parametrize(
    "change",
    [
        {"layer_bytes": [float("inf")]},
        {"layer_bytes": [-1]},
        {"layer_bytes": [1000, 0]},
        {"layer_bytes": [LONG, "many"]},
        {"took_s": -1.0},
        {"took_s": "long"},
        {"layer": {"rows": [LONG], "seconds": [1.0], "row_s": 1.0}},
        {"tiers": [3]},
        {"conditions": []},
        {"version": VERSION - 1},
    ],
    ids=lambda change: str(change)[:32],
)
def test_an_entry_that_cannot_be_read_is_no_profile_and_is_said_to_be_there(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    write(tmp_path, {**MINE.as_dict(), **change})
    assert recall(tmp_path, CONDITIONS) is None
    assert differing(tmp_path, CONDITIONS) == UNREADABLE
    remembered = Remembered(tmp_path, lambda namespace: CONDITIONS)
    assert remembered(CONDITIONS.namespace) == (None, UNREADABLE)


def test_of_profiles_that_can_be_read_the_least_different_is_named(tmp_path: Path) -> None:
    other = replace(THEIRS, conditions=replace(THEIRS.conditions, threads=64))
    write(tmp_path, {"version": 1}, other.as_dict(), THEIRS.as_dict())
    assert differing(tmp_path, CONDITIONS) == "machine another"


def test_where_nothing_is_kept_nothing_differs(tmp_path: Path) -> None:
    assert differing(tmp_path, CONDITIONS) == ""
    strange = replace(MINE, conditions=replace(CONDITIONS, namespace="b" * 64))
    write(tmp_path, strange.as_dict())
    assert differing(tmp_path, CONDITIONS) == ""


def test_entries_of_another_version_stay_as_they_are(tmp_path: Path) -> None:
    """Two versions of blendrag on one store, each of which reads its own."""
    earlier = {"version": VERSION - 1, "conditions": THEIRS.as_dict()["conditions"], "odd": [1e999]}
    later = {"version": VERSION + 1, "figures": {"deep": [None]}}
    write(tmp_path, earlier, THEIRS.as_dict(), later)
    remember(tmp_path, MINE)
    assert written(tmp_path)[0] == earlier
    assert written(tmp_path)[2] == later
    assert recall(tmp_path, CONDITIONS) == MINE
    assert recall(tmp_path, THEIRS.conditions) == THEIRS


def test_a_profile_takes_the_place_of_its_own_conditions_even_of_a_damaged_one(
    tmp_path: Path,
) -> None:
    broken = {**MINE.as_dict(), "layer_bytes": []}
    write(tmp_path, broken, MINE.as_dict(), THEIRS.as_dict())
    again = replace(MINE, fixed_s=0.5)
    remember(tmp_path, again)
    assert recall(tmp_path, CONDITIONS) == again
    assert len(written(tmp_path)) == 2


def test_no_more_entries_are_kept_than_so_many_whoever_reads_them(tmp_path: Path) -> None:
    write(tmp_path, *[{"version": 1, "number": number} for number in range(KEPT)])
    remember(tmp_path, MINE)
    assert [entry.get("number") for entry in written(tmp_path)] == [*range(1, KEPT), None]


def test_a_file_that_is_no_json_is_replaced(tmp_path: Path) -> None:
    write(tmp_path).write_text("{")
    remember(tmp_path, MINE)
    assert written(tmp_path) == [json.loads(json.dumps(MINE.as_dict()))]
