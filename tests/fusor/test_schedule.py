"""How r is spread over the layers, for every family, ratio and size."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from blendrag.errors import InvalidInputError
from blendrag.fusor.selection import Schedule, make_policy

ratios = st.floats(0.0, 1.0)
named = st.one_of(
    st.just("constant"),
    st.just("linear"),
    st.floats(0.05, 1.0).map(lambda g: f"geometric:{g}"),
    st.integers(1, 50).map(lambda m: f"first:{m}"),
)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, int]:
    layers = draw(st.integers(2, 40))
    if draw(st.booleans()):
        return Schedule.parse(draw(named)), layers
    weights = draw(st.lists(st.floats(0.0, 5.0), min_size=layers - 1, max_size=layers - 1))
    weights[0] = max(weights[0], 0.25)
    return Schedule.parse(sorted(weights, reverse=True)), layers


@settings(max_examples=300, deadline=None)
@given(schedules(), ratios)
def test_shares_have_mean_r_lie_in_zero_to_one_and_never_increase(
    drawn: tuple[Schedule, int], ratio: float
) -> None:
    schedule, layers = drawn
    shares = schedule.shares(ratio, layers)
    assert len(shares) == layers - 1
    assert math.isclose(sum(shares) / len(shares), ratio, abs_tol=1e-9)
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert all(b <= a + 1e-12 for a, b in pairwise(shares))


@settings(max_examples=300, deadline=None)
@given(schedules(), ratios, st.integers(0, 4000))
def test_counts_sum_to_r_and_never_increase(
    drawn: tuple[Schedule, int], ratio: float, candidates: int
) -> None:
    schedule, layers = drawn
    counts = schedule.counts(ratio, layers, candidates)
    total = ratio * candidates * (layers - 1)
    assert abs(sum(counts) - total) <= 0.5 + 1e-6 * max(total, 1.0)
    assert all(0 <= count <= candidates for count in counts)
    assert counts == sorted(counts, reverse=True)


def test_the_cap_gives_what_it_takes_to_the_later_layers() -> None:
    shares = Schedule.parse("geometric:0.2").shares(0.5, 5)
    assert shares[0] == 1.0
    assert sum(shares) == pytest.approx(2.0)
    assert shares[1] / shares[2] == pytest.approx(5.0) or shares[1] == 1.0
    uncapped = [0.5 * 4 * 0.2**i / sum(0.2**j for j in range(4)) for i in range(4)]
    assert uncapped[0] > 1.0  # the cap had something to take
    assert all(a > b for a, b in zip(shares[1:], uncapped[1:], strict=True))


def test_shapes_are_what_their_names_say() -> None:
    assert Schedule.parse("constant").shares(0.3, 5) == pytest.approx([0.3] * 4)
    linear = Schedule.parse("linear").shares(0.2, 4)
    assert linear == pytest.approx([0.3, 0.2, 0.1])
    geometric = Schedule.parse("geometric:0.5").shares(0.1, 4)
    assert [b / a for a, b in pairwise(geometric)] == pytest.approx([0.5] * 2)
    assert Schedule.parse("first:2").shares(0.2, 5) == pytest.approx([0.4, 0.4, 0.0, 0.0])
    vector = Schedule.parse("4,2,2").shares(0.2, 4)
    assert vector == pytest.approx([0.3, 0.15, 0.15])


def test_more_than_the_first_layers_hold_goes_to_the_later_ones() -> None:
    assert Schedule.parse("first:1").shares(0.4, 5) == pytest.approx([1.0, 0.2, 0.2, 0.2])
    assert Schedule.parse("first:9").shares(0.4, 5) == pytest.approx([0.4] * 4)


def test_calibrated_is_open_until_it_carries_weights() -> None:
    found = Schedule.parse("calibrated:3,2,1")
    assert found.shares(0.2, 4) == Schedule.parse("3,2,1").shares(0.2, 4)
    assert not found.is_open
    assert Schedule.parse("calibrated").is_open
    with pytest.raises(InvalidInputError, match="look them up"):
        Schedule.parse("calibrated").shares(0.2, 4)


@pytest.mark.parametrize("weights", ["3,1,2", "calibrated:3,1,2", [3.0, 1.0, 2.0]])
def test_a_vector_that_rises_is_refused_because_sets_are_nested(weights: Any) -> None:
    with pytest.raises(InvalidInputError, match="rises from 1 to 2 at layer 3") as raised:
        Schedule.parse(weights)
    assert tiny.one_sentence(str(raised.value))


def test_a_rise_of_rounding_alone_is_none() -> None:
    shares = Schedule.parse([0.1 + 0.2, 0.3, 0.1 + 0.2]).shares(0.2, 4)
    assert shares == pytest.approx([0.2] * 3)
    assert shares == sorted(shares, reverse=True)


def test_one_layer_has_nothing_to_spread() -> None:
    assert Schedule.parse("constant").shares(0.5, 1) == []


@pytest.mark.parametrize(
    "text",
    ["constant", "linear", "geometric:0.6", "first:3", "3,2,1", "calibrated", "calibrated:3,2,1"],
)
def test_a_schedule_prints_as_it_is_read(text: str) -> None:
    assert str(Schedule.parse(text)) == text
    assert Schedule.parse(str(Schedule.parse(text))) == Schedule.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "cubic", "constant:2", "linear:1", "geometric:0", "geometric:1.5", "geometric:-1",
        "geometric:x", "geometric:nan", "geometric:", "1,2,x", "0,0,0", "1,-1,2", ",", "1,,2", "0.5",
        "nan,1,1", "inf,1,1", "first", "first:", "first:0", "first:-1", "first:1.5", "calibrated:",
        "calibrated:x", "calibrated:0,0",
    ],
)  # fmt: skip
def test_a_bad_schedule_is_one_sentence(text: str) -> None:
    if text in ("geometric:", "calibrated:"):  # nothing behind the colon is said to be different
        assert Schedule.parse(text) == Schedule.parse(text[:-1])
        return
    with pytest.raises(InvalidInputError) as raised:
        Schedule.parse(text)
    assert tiny.one_sentence(str(raised.value))
    assert "schedule" in str(raised.value)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0]])
def test_a_bad_sequence_of_weights_is_one_sentence(weights: list[float]) -> None:
    with pytest.raises(InvalidInputError) as raised:
        Schedule.parse(weights)
    assert tiny.one_sentence(str(raised.value))


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_outside_zero_to_one_is_refused(ratio: float) -> None:
    with pytest.raises(InvalidInputError, match="outside"):
        Schedule.parse("constant").shares(ratio, 4)


def test_a_vector_of_another_length_says_how_many_are_needed() -> None:
    with pytest.raises(InvalidInputError, match=r"has 2 entries, this model needs 3"):
        Schedule.parse("2,1").shares(0.2, 4)


@pytest.mark.parametrize(
    "text", ["", "best", "hkvd(3)", "boundary(-1)", "boundary(x)", "HKVD", "reuse()"]
)
def test_a_bad_policy_is_one_sentence(text: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        make_policy(text)
    assert tiny.one_sentence(str(raised.value))


def test_policies_are_made_by_name() -> None:
    for name in ("full", "reuse", "hkvd", "boundary"):
        assert make_policy(name).name == name
    assert make_policy(" boundary(7) ").k == 7  # type: ignore[attr-defined]
    policy = make_policy("hkvd")
    assert make_policy(policy) is policy
