"""The figures of a machine profile, and the record of profiles in a store."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from blendrag.planning.profile import Curve, ProfileCache, Tier, profiles, recall_profile
from planning.invented import CONDITIONS, line, profile

MINE = profile(device_bytes_per_s=1e10)
THEIRS = replace(MINE, conditions=replace(CONDITIONS, machine="another"))
LONG = 10**400


def write(root: Path, *entries: Any) -> None:
    kept = profiles(root, CONDITIONS.namespace)
    kept.path.parent.mkdir(parents=True, exist_ok=True)
    kept.path.write_text(json.dumps({"profiles": entries}))


# -- figures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [((), ()), ((1.0,), ()), ((1.0, 2.0), (2.0, 1.0)), ((2.0, 1.0), (1.0, 2.0))],
)
def test_an_empty_or_falling_curve_is_refused(rows, seconds):
    with pytest.raises(ValueError, match="no curve"):
        Curve(rows, seconds, 0.0)


def test_no_rows_cost_nothing_but_the_moving_of_keys():
    assert line(1e-3, placed_s=1e-6)(0, 0, 100) == pytest.approx(1e-4)
    assert line(1e-3)(0, 0) == 0.0


def test_a_read_costs_its_latency_and_its_bytes():
    assert Tier("disk", 1e6, read_s=1e-3).seconds(1e6, 3) == pytest.approx(1.003)


# -- the record --------------------------------------------------------------------------------------


def test_a_profile_is_recalled_only_for_its_own_conditions(tmp_path):
    assert recall_profile(tmp_path, CONDITIONS) == (None, "")
    other = replace(THEIRS, conditions=replace(THEIRS.conditions, threads=64))
    for made in (other, THEIRS):
        profiles(tmp_path, CONDITIONS.namespace).keep(made)
    assert recall_profile(tmp_path, CONDITIONS) == (None, "machine another")  # the closest
    profiles(tmp_path, CONDITIONS.namespace).keep(MINE)
    assert recall_profile(tmp_path, CONDITIONS) == (MINE, "")
    assert recall_profile(tmp_path, THEIRS.conditions) == (THEIRS, "")


@pytest.mark.parametrize(
    "change",
    [
        {"layer_bytes": [float("inf")]}, {"layer_bytes": [1000, 0]}, {"layer_bytes": []},
        {"layer_bytes": [LONG, "many"]}, {"took_s": "long"}, {"peek_s": -1.0},
        {"fixed_s": float("inf")}, {"device_bytes_per_s": 0.0},
        {"layer": {"rows": [LONG], "seconds": [1.0], "row_s": 1.0}},
        {"tiers": [3]}, {"tiers": []}, {"conditions": []}, {"version": MINE.version - 1},
    ],
    ids=lambda change: str(change)[:32],
)  # fmt: skip
def test_an_unreadable_entry_is_no_profile_and_is_reported(tmp_path, change):
    broken = {**asdict(MINE), **change}
    write(tmp_path, broken)
    cached = ProfileCache(tmp_path, lambda namespace: CONDITIONS)
    assert cached(CONDITIONS.namespace) == (None, "another version of blendrag")
    write(tmp_path, broken, asdict(MINE))
    assert cached(CONDITIONS.namespace) == (MINE, "")


def test_a_profile_replaces_that_of_its_conditions_and_keeps_other_versions(tmp_path):
    earlier = {"version": MINE.version - 1, "conditions": asdict(MINE)["conditions"]}
    broken = {**asdict(MINE), "layer_bytes": []}
    write(tmp_path, earlier, broken, asdict(MINE), asdict(THEIRS))
    again = replace(MINE, fixed_s=0.5)
    profiles(tmp_path, CONDITIONS.namespace).keep(again)
    assert recall_profile(tmp_path, CONDITIONS) == (again, "")
    entries = profiles(tmp_path, CONDITIONS.namespace).unchecked()
    assert len(entries) == 3
    assert entries[0] == earlier


def test_the_record_is_read_again_only_when_it_changes(tmp_path):
    looked: list[str] = []

    def conditions(namespace: str) -> Any:
        looked.append(namespace)
        return CONDITIONS

    cached = ProfileCache(tmp_path, conditions)
    assert cached(CONDITIONS.namespace) == cached(CONDITIONS.namespace) == (None, "")
    assert len(looked) == 1
    profiles(tmp_path, CONDITIONS.namespace).keep(MINE)
    assert cached(CONDITIONS.namespace) == (MINE, "")
    profiles(tmp_path, CONDITIONS.namespace).path.unlink()
    assert cached(CONDITIONS.namespace) == (None, "")
