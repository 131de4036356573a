"""Which prefills a profile times: no more tokens computed than is bearable, over prompts as long as usual."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from blendrag.profile.model_times import Shape, Timed, usual
from blendrag.profile.prefills import FAR_TOKENS, FRESH, RATIOS, Prefills

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
    assert max(shape.candidates for _, shape in blended(prefills(512), "query")) == 5 * 512


@pytest.mark.parametrize("bearable", [64, 512, 4096])
@pytest.mark.parametrize("context", [300, 1000, 5000, 32768])
def test_no_prompt_passes_the_context_or_what_was_set(bearable: int, context: int) -> None:
    made = prefills(min(bearable, context), context, min(512, context // 4))
    for policy in ("random", "query", "hkvd", "offset+random"):
        for _, shape in blended(made, policy):
            assert shape.tokens <= min(context, max(FAR_TOKENS, bearable))


def test_what_was_timed_often_counts_by_its_medians() -> None:
    runs = [Timed((1.0, 5.0), 0.1), Timed((9.0, 4.0), 0.9), Timed((2.0, 6.0), 0.2)]
    assert usual(runs) == Timed((2.0, 5.0), 0.2)
