"""Which prefills a profile times: no more tokens computed than is bearable, over prompts as long as usual."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from blendrag.planning.curve import Curve
from blendrag.planning.measure import Measure
from blendrag.planning.model_times import Shape, Timed, usual
from blendrag.planning.prefills import ASKS, FAR_TOKENS, FRESH, LOOKS, RATIOS, Prefills

LAYERS = 4


def prefills(bearable: int, context: int = 32768, chunk_tokens: int = 512) -> Prefills:
    times: Any = SimpleNamespace(longest=context, stock=print, blended=print)
    lengths = [n for n in (64, 128, 256, 512, 1024, 2048, 4096) if n <= bearable]
    return Prefills(times, LAYERS, chunk_tokens, lengths)


def blended(made: Prefills, policy: str) -> list[tuple[float, Shape]]:
    keys: list[Any] = [key for key in made.jobs() if key[0] == policy]
    return [(ratio, shape) for _, ratio, shape in keys]


def test_a_prompt_far_longer_than_what_is_bearable_is_timed_at_the_ratios_that_are() -> None:
    timed = blended(prefills(512), "random")
    far = max(timed, key=lambda each: each[1].tokens)[1]
    assert far == Shape(5, 512, FRESH)  # six times 512 tokens, in whole chunks
    assert [ratio for ratio, shape in timed if shape == far] == [0.0, 0.05, 0.15]
    for ratio, shape in timed:
        assert FRESH + ratio * shape.candidates <= 512
    for shape in {shape for _, shape in timed} - {far}:
        assert [ratio for ratio, each in timed if each == shape] == list(RATIOS)


def test_the_far_prompt_is_asked_questions_over_too() -> None:
    assert max(shape.candidates for _, shape in blended(prefills(512), ASKS)) == 5 * 512


@pytest.mark.parametrize("bearable", [64, 512, 4096])
@pytest.mark.parametrize("context", [300, 1000, 5000, 32768])
def test_no_prompt_passes_the_context_or_what_was_set(bearable: int, context: int) -> None:
    made = prefills(min(bearable, context), context, min(512, context // 4))
    for policy in ("random", ASKS, LOOKS):
        for _, shape in blended(made, policy):
            assert shape.tokens <= min(context, max(FAR_TOKENS, bearable))


def test_what_was_timed_often_counts_by_its_medians() -> None:
    runs = [
        Timed((1.0, 5.0), (0.1, 0.5), 0.1),
        Timed((9.0, 4.0), (0.9, 0.1), 0.9),
        Timed((2.0, 6.0), (0.2, 0.9), 0.2),
    ]
    assert usual(runs) == Timed((2.0, 5.0), (0.2, 0.5), 0.2)


def test_the_last_layer_is_no_layer_like_the_others() -> None:
    made = prefills(256)
    found: Any = {key: Timed((3 * 0.2 + 0.05,), (0.05,), 0.1) for key in made.jobs()}
    points = made.layer_points(found)
    assert [point.seconds for point in points] == pytest.approx([0.2] * len(points))
    assert {point.seconds for point in made.last_points(found)} == {0.05}


def test_of_a_model_of_one_layer_it_is_the_only_one() -> None:
    times: Any = SimpleNamespace(longest=4096, stock=print, blended=print)
    made = Prefills(times, 1, 512, [64, 128])
    found: Any = {key: Timed((0.05,), (0.05,), 0.1) for key in made.jobs()}
    assert {point.seconds for point in made.layer_points(found)} == {0.05}


@pytest.mark.parametrize(
    ("times_s", "bearable"),
    [
        ((9.0, 3.0, 7.0), [128, 256]),  # the first is slow even warm: two lengths all the same
        ((9.0, 0.4, 0.9, 2.0), [128, 256, 512]),  # that it was slow cold says nothing
        ((9.0, 0.1, 0.2, 0.3, 0.6, 0.9), [128, 256, 512, 1024, 2048]),
    ],
)
def test_lengths_end_where_they_take_too_long_and_there_are_two_at_least(
    times_s: tuple[float, ...], bearable: list[int]
) -> None:
    left = list(times_s)
    measuring: Any = SimpleNamespace(
        _stock_s=lambda tokens: left.pop(0) if left else 99.0, _step=lambda what: None
    )
    assert (
        Measure._bearable(measuring, [128, 256, 512, 1024, 2048][: len(bearable) + 1]) == bearable
    )


def test_the_curve_of_a_prefill_timed_at_two_lengths_takes_attention_from_the_layers() -> None:
    layer = Curve((1.0,), (1e-3,), 1e-4, pair_s=5e-7)
    for lengths, expected in ((2, LAYERS * 5e-7), (6, 0.0)):
        made = prefills(64 * 2 ** (lengths - 1))
        found: Any = {("prefill", n): Timed((1e-2 * n,), (2e-3 * n,), 0.1) for n in made.lengths}
        assert made.prefill_curve(found, layer).pair_s == pytest.approx(expected, abs=1e-9)
