"""Scores against values worked by hand; PGR and its paired intervals."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from blendrag.errors import UnsupportedModelError
from blendrag_lab.evaluation import scoring
from blendrag_lab.evaluation.scoring import (
    Estimate,
    Kept,
    answers_kept,
    paired_lead,
    performance_gap_recovered,
    sum_by_context,
)

CONTEXTS = [f"c{i // 3}" for i in range(60)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("The  Eiffel Tower!", "eiffel tower"), ("a theatre, an apple", "theatre apple"),
     ("U.S.A.", "usa"), ("", "")],
)  # fmt: skip
def test_normalisation_is_squads(text, expected):
    assert scoring.normalised(text) == expected


def test_an_answer_matches_a_whole_accepted_answer():
    assert scoring.exact_match("the Porto.", ["Lisbon", "porto"]) == 1.0
    assert scoring.exact_match("Porto city", ["porto"]) == 0.0
    assert scoring.exact_match("", ["porto"]) == 0.0


def test_f1_counts_words_and_takes_the_best_accepted_answer():
    # two of two given words are among three expected ones: 2 · 2 / (2 + 3)
    assert scoring.f1("Exeter College", ["Exeter College Oxford"]) == pytest.approx(0.8)
    assert scoring.f1("Exeter College", ["no", "exeter, college"]) == 1.0
    assert scoring.f1("red red", ["red blue"]) == pytest.approx(0.5)  # a word counts once a time
    assert scoring.f1("something", ["other"]) == 0.0
    assert scoring.f1("", ["other"]) == 0.0


def test_rouge_l_is_the_longest_common_subsequence():
    # "cat sat" of three words each
    assert scoring.rouge_l("the cat sat", ["a cat sat"]) == pytest.approx(2 / 3)
    assert scoring.rouge_l("nothing", ["a cat sat", "nothing"]) == 1.0


def test_kl_is_of_full_prefill_from_the_other_row_by_row():
    full = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    other = torch.tensor([[0.5, 0.5]] * 2).log() + 3.0  # logits are known up to a constant
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert scoring.token_kl(full, other) == pytest.approx([expected, 0.0])
    excluded = torch.tensor([[1.0, 0.0, -math.inf]])
    assert scoring.token_kl(excluded, excluded) == [0.0]
    assert 0.0 < scoring.token_kl(excluded, torch.tensor([[1.0, 0.0, 5.0]]))[0] < math.inf
    assert scoring.token_kl(torch.tensor([[1.0, 0.0, 5.0]]), excluded) == [math.inf]


def test_logits_that_are_not_numbers_are_an_error():
    numbers, broken = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, math.nan]])
    for full, other in ((numbers, broken), (broken, numbers), (broken, broken)):
        with pytest.raises(UnsupportedModelError, match="not numbers"):
            scoring.token_kl(full, other)


ALL_RIGHT, NONE_RIGHT = [1.0] * 60, [0.0] * 60


def shares(share: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [float(rng.random() < share) for _ in CONTEXTS]


def pgr(
    own: list[float], full: list[float] = ALL_RIGHT, nothing: list[float] = NONE_RIGHT, **more: Any
) -> Estimate:
    contexts = more.get("contexts", CONTEXTS)
    sums = [sum_by_context(zip(contexts, s, strict=True)) for s in (own, full, nothing)]
    return performance_gap_recovered(sums[0], sums[1], sums[2])


def test_pgr_is_the_share_of_the_gain_with_an_interval_of_paired_draws():
    scores, full, nothing = shares(0.7, 1), shares(0.9, 2), shares(0.2, 3)
    gain = pgr(scores)
    assert gain.value == pytest.approx(sum(scores) / 60)
    assert 0.0 < gain.low < gain.value < gain.high < 1.0  # type: ignore[operator]
    assert pgr(scores, full, nothing) == pgr(scores, full, nothing)
    assert pgr(full, full, nothing) == Estimate(1.0, 1.0, 1.0)
    assert pgr(nothing, full, nothing) == Estimate(0.0, 0.0, 0.0)
    full, nothing = [1.0, 0.0] * 30, [1.0, 0.0, 0.0] * 20
    assert pgr(NONE_RIGHT, full, nothing).value == pytest.approx(-2.0)
    assert pgr(ALL_RIGHT, full, nothing).value == pytest.approx(4.0)


def test_pgr_is_undefined_if_full_prefill_gains_nothing_over_no_context():
    full = shares(0.7, 1)
    assert pgr(ALL_RIGHT, full, full) == Estimate(None)
    assert pgr(NONE_RIGHT, NONE_RIGHT, full) == Estimate(None)
    assert pgr(full, [1.0] * 3 + NONE_RIGHT[3:], NONE_RIGHT) == Estimate(None)  # 0.05 of 60
    # With gains in one context of twenty, many draws have none.
    few = pgr(full, [1.0] * 4 + NONE_RIGHT[4:], NONE_RIGHT)
    assert few.value is not None
    assert few.low is None


def test_questions_about_one_context_are_drawn_together():
    scores = [float(i % 6 < 3) for i in range(60)]  # whole contexts right, others wrong
    by_context, by_question = pgr(scores), pgr(scores, contexts=[str(i) for i in range(60)])
    width = by_context.high - by_context.low  # type: ignore[operator]
    assert width > 1.3 * (by_question.high - by_question.low)  # type: ignore[operator]
    assert pgr(scores, contexts=["c"] * 60) == Estimate(0.5)  # one context has no interval


def test_a_paired_lead_is_the_difference_of_means_with_an_interval():
    own, other = shares(0.5, 1), shares(0.8, 2)
    mine, theirs = (sum_by_context(zip(CONTEXTS, s, strict=True)) for s in (own, other))
    lead, back = paired_lead(theirs, mine), paired_lead(mine, theirs)
    assert lead.value == pytest.approx((sum(other) - sum(own)) / 60)
    assert lead.low < lead.value < lead.high  # type: ignore[operator]
    assert (back.value, back.low, back.high) == pytest.approx((-lead.value, -lead.high, -lead.low))  # type: ignore[operator]
    assert (lead.is_above_zero, back.is_above_zero) == (True, False)
    wide = [(1, float(i % 2)) for i in range(40)]
    lead = paired_lead([(n, score + 0.1) for n, score in wide], wide)
    assert (lead.low, lead.high) == pytest.approx((0.1, 0.1))  # what both have in common cancels


def test_other_questions_or_one_context_have_no_lead():
    assert paired_lead([(5, 4.0)], [(5, 3.0)]) == Estimate(None)
    assert paired_lead([(5, 4.0), (5, 4.0)], [(5, 3.0), (4, 3.0)]) == Estimate(None)
    assert paired_lead([(5, 4.0), (5, 4.0)], ()) == Estimate(None)


def test_answers_are_kept_of_those_that_full_prefill_gives_right():
    full = [(1, 1.0), (1, 0.5), (1, 0.4), (1, 0.0)]
    assert answers_kept([(1, 1.0), (1, 0.0), (1, 0.8), (1, 0.0)], full) == Kept(2, 0.5, 0.5)
    assert answers_kept(full, full) == Kept(2, 1.0, 0.0)
    assert answers_kept((), full) == Kept(2)
    assert answers_kept([(1, 1.0)], [(1, 1.0)]) == Kept(1, 1.0, None)
    # of the middle context nobody knows which question is answered
    several = [(3, 3.0), (2, 1.0), (2, 0.0)]
    assert answers_kept([(3, 1.5), (2, 1.0), (2, 1.0)], several) == Kept(3, 0.5, 0.5)
