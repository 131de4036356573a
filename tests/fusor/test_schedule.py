"""How r is spread over the layers, for every family, ratio and size."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from blendrag.errors import InvalidInputError
from blendrag.fusor.selection import Schedule

named = st.one_of(
    st.sampled_from(["constant", "linear"]),
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


@settings(max_examples=120, deadline=None)
@given(schedules(), st.floats(0.0, 1.0), st.integers(0, 4000))
def test_shares_have_mean_r_counts_sum_to_it_and_neither_increases(drawn, ratio, candidates):
    schedule, layers = drawn
    shares = schedule.shares(ratio, layers)
    assert len(shares) == layers - 1
    assert math.isclose(sum(shares) / len(shares), ratio, abs_tol=1e-9)
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert all(b <= a + 1e-12 for a, b in pairwise(shares))
    counts = schedule.counts(ratio, layers, candidates)
    total = ratio * candidates * (layers - 1)
    assert abs(sum(counts) - total) <= 0.5 + 1e-6 * max(total, 1.0)
    assert all(0 <= count <= candidates for count in counts)
    assert counts == sorted(counts, reverse=True)


def test_what_the_cap_takes_goes_to_later_layers():
    shares = Schedule.parse("geometric:0.2").shares(0.5, 5)
    assert shares[0] == 1.0
    assert sum(shares) == pytest.approx(2.0)
    uncapped = [0.5 * 4 * 0.2**i / sum(0.2**j for j in range(4)) for i in range(4)]
    assert uncapped[0] > 1.0
    assert all(a > b for a, b in zip(shares[1:], uncapped[1:], strict=True))
    assert Schedule.parse("first:1").shares(0.4, 5) == pytest.approx([1.0, 0.2, 0.2, 0.2])


@pytest.mark.parametrize(
    ("text", "ratio", "shares"),
    [
        ("constant", 0.3, [0.3] * 4),
        ("linear", 0.2, [0.3, 0.2, 0.1]),
        ("geometric:0.5", 0.07, [0.12, 0.06, 0.03]),
        ("first:2", 0.2, [0.4, 0.4, 0.0, 0.0]),
        ("first:9", 0.4, [0.4] * 4),
        ("4,2,2", 0.2, [0.3, 0.15, 0.15]),
        ([0.1 + 0.2, 0.3, 0.1 + 0.2], 0.2, [0.2] * 3),  # a rise of rounding
        ("constant", 0.5, []),
    ],
)
def test_shapes_are_what_their_names_say(text, ratio, shares):
    got = Schedule.parse(text).shares(ratio, len(shares) + 1)
    assert got == pytest.approx(shares)
    assert got == sorted(got, reverse=True)


@pytest.mark.parametrize("weights", ["3,1,2", [3.0, 1.0, 2.0]])
def test_a_vector_that_rises_is_refused_because_sets_are_nested(weights):
    with tiny.refuses("rises from 1 to 2 at layer 3"):
        Schedule.parse(weights)


@pytest.mark.parametrize(
    "text",
    ["constant", "linear", "geometric:0.6", "first:3", "3,2,1"],
)
def test_a_schedule_prints_as_it_is_read(text):
    assert str(Schedule.parse(text)) == text
    assert Schedule.parse(str(Schedule.parse(text))) == Schedule.parse(text)
    assert Schedule.parse("geometric:") == Schedule.parse("geometric")


@pytest.mark.parametrize(
    "text",
    [
        "", "cubic", "constant:2", "linear:1", "geometric:0", "geometric:1.5", "geometric:-1",
        "geometric:x", "geometric:nan", "1,2,x", "0,0,0", "1,-1,2", ",", "1,,2", "0.5",
        "nan,1,1", "inf,1,1", "first", "first:", "first:0", "first:-1", "first:1.5",
        "calibrated", [], [0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0],
    ],
)  # fmt: skip
def test_a_bad_schedule_is_one_sentence(text):
    with tiny.refuses("schedule"):
        Schedule.parse(text)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_outside_zero_to_one_is_refused(ratio):
    with pytest.raises(InvalidInputError, match="outside"):
        Schedule.parse("constant").shares(ratio, 4)


def test_a_vector_of_another_length_says_how_many_are_needed():
    with pytest.raises(InvalidInputError, match=r"has 2 entries, this model needs 3"):
        Schedule.parse("2,1").shares(0.2, 4)
