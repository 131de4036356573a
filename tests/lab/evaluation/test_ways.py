"""Which ways there are, and which dimensions each has."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendrag.errors import InvalidInputError
from blendrag.fusor.selection import POLICIES
from blendrag.lab.evaluation.ways import Way, default_policies, look_up, make_ways
from blendrag.planning.calibration import Calibration, remember_calibration


def test_full_prefill_and_no_context_are_always_there_and_once() -> None:
    assert make_ways([], [], [], []) == (Way("none"), Way("full"))
    made = make_ways(["full", "none", "full"], ["constant"], [0.1], [True])
    assert made == (Way("none"), Way("full"))


def test_a_policy_meets_every_schedule_ratio_and_prefix() -> None:
    made = make_ways(["query"], ["constant", "linear"], [0.1, 0.2], [True, False])
    assert len(made) == 2 + 8
    assert Way("query", "linear", 0.2, False) in made
    assert len({way.key for way in made}) == len(made)
    close = make_ways(["query"], ["constant"], [0.1234567, 0.1234568], [True])
    assert len({way.key for way in close}) == 4


def test_who_knows_neither_ratio_nor_schedule_is_asked_once() -> None:
    made = make_ways(["reuse", "boundary(4)", "hkvd-once"], ["constant", "linear"], [0.1], [True])
    assert made[2:] == (
        Way("reuse", encode_prefix=True),
        Way("boundary(4)", encode_prefix=True),
        Way("hkvd-once", "constant", 0.1, True),
    )


def test_every_registered_policy_and_prefix_caching_are_asked_by_default() -> None:
    named = {way.policy for way in make_ways(default_policies(), ["constant"], [0.1], [True])}
    assert named == {*POLICIES, "none", "prefix"}


@pytest.mark.parametrize("policy", [*POLICIES, "prefix", "map-reduce", "map-rerank", "none"])
def test_every_way_becomes_a_request(policy: str) -> None:
    for way in make_ways([policy], ["linear"], [0.1], [True]):
        options = way.options(5)
        assert options.max_new_tokens == 5
        assert (options.policy == policy) == (options.mode == "blend")


def test_calibrated_means_what_the_store_holds_for_the_policy(tmp_path: Path) -> None:
    found = Calibration("query", 0.1, (0.5, 0.25), 0.0, "constant", 0.0, 0.0, 1, 0, "given")
    remember_calibration(tmp_path, "model", found)
    made = make_ways(["full", "query"], ["calibrated", "constant"], [0.1], [True])
    *others, calibrated, constant = look_up(made, tmp_path, "model")
    assert (*others, constant) == (*made[:2], made[3])
    assert calibrated.schedule == "calibrated"
    assert calibrated.options(5).schedule == "calibrated:0.5,0.25"
    assert calibrated.key != made[2].key  # another calibration is asked anew
    with pytest.raises(InvalidInputError, match="no schedule of policy hkvd is calibrated"):
        look_up(make_ways(["hkvd"], ["calibrated"], [0.1], [True]), tmp_path, "model")
    with pytest.raises(InvalidInputError, match="blendrag calibrate"):
        look_up(made, tmp_path, "other model")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [((["magic"], ["constant"], [0.1]), "'magic' is not one of"),
     ((["query"], ["steep"], [0.1]), "'steep'"),
     ((["query"], ["constant"], [1.5]), r"ratio 1.5 must be a number in \[0, 1\]"),
     ((["query"], ["constant"], [float("nan")]), "ratio nan must be a number")],
)  # fmt: skip
def test_what_does_not_exist_is_one_sentence(
    given: tuple[list[str], list[str], list[float]], sentence: str
) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        make_ways(*given, [True])
