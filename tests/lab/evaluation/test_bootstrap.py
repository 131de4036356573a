"""PGR and its paired intervals, where they are known."""

from __future__ import annotations

import random

import pytest

from blendrag.errors import InvalidInputError
from blendrag.lab.evaluation.bootstrap import UNDEFINED, PairedBootstrap, paired_lead

CONTEXTS = [f"c{i // 3}" for i in range(60)]


def shares(share: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [float(rng.random() < share) for _ in CONTEXTS]


def test_between_nothing_and_everything_pgr_is_the_score() -> None:
    scores = shares(0.7, 1)
    gain = PairedBootstrap([1.0] * 60, [0.0] * 60, CONTEXTS).gain(scores)
    assert gain.pgr == pytest.approx(sum(scores) / 60)
    assert gain.low is not None
    assert gain.high is not None
    assert 0.0 < gain.low < gain.pgr < gain.high < 1.0


def test_full_prefill_gains_one_and_no_context_nothing_whatever_is_drawn() -> None:
    full, nothing = shares(0.9, 2), shares(0.2, 3)
    paired = PairedBootstrap(full, nothing, CONTEXTS)
    one, none = paired.gain(full), paired.gain(nothing)
    assert (one.pgr, one.low, one.high) == pytest.approx((1.0, 1.0, 1.0))
    assert (none.pgr, none.low, none.high) == pytest.approx((0.0, 0.0, 0.0))


def test_equal_answers_have_equal_intervals() -> None:
    full, nothing, scores = shares(0.9, 2), shares(0.2, 3), shares(0.6, 4)
    paired = PairedBootstrap(full, nothing, CONTEXTS, seed=7)
    assert paired.gain(scores) == paired.gain(list(scores))
    again = PairedBootstrap(full, nothing, CONTEXTS, seed=7)
    assert again.gain(scores) == paired.gain(scores)


def test_pgr_may_be_below_nothing_and_above_full_prefill() -> None:
    paired = PairedBootstrap([1.0, 0.0] * 30, [1.0, 0.0, 0.0] * 20, CONTEXTS)
    worse, better = paired.gain([0.0] * 60).pgr, paired.gain([1.0] * 60).pgr
    assert worse == pytest.approx(-2.0)
    assert better == pytest.approx(4.0)


def test_where_full_prefill_gains_next_to_nothing_pgr_is_undefined() -> None:
    paired = PairedBootstrap([1.0, 0.0] * 30, [1.0, 0.0] * 30, CONTEXTS)
    assert paired.gain([1.0] * 60) == UNDEFINED


def test_questions_about_one_context_are_drawn_together() -> None:
    scores = [float(i % 6 < 3) for i in range(60)]  # whole contexts right, others wrong
    full, nothing = [1.0] * 60, [0.0] * 60
    together = PairedBootstrap(full, nothing, CONTEXTS).gain(scores)
    alone = PairedBootstrap(full, nothing, [str(i) for i in range(60)]).gain(scores)
    assert together.high is not None
    assert together.low is not None
    assert alone.high is not None
    assert alone.low is not None
    assert together.high - together.low > 1.3 * (alone.high - alone.low)


def test_the_interval_narrows_as_questions_are_added() -> None:
    few = PairedBootstrap([1.0] * 60, [0.0] * 60, CONTEXTS).gain(shares(0.5, 5))
    contexts = [f"c{i // 3}" for i in range(960)]
    scores = [score for _ in range(16) for score in shares(0.5, 5)]
    many = PairedBootstrap([1.0] * 960, [0.0] * 960, contexts).gain(scores)
    assert many.high - many.low < 0.5 * (few.high - few.low)  # type: ignore[operator]


def test_of_one_context_there_is_no_interval() -> None:
    gain = PairedBootstrap([1.0] * 3, [0.0] * 3, ["only"] * 3).gain([1.0, 1.0, 0.0])
    assert (gain.pgr, gain.low, gain.high) == (pytest.approx(2 / 3), None, None)


def test_where_too_many_draws_leave_pgr_undefined_there_is_no_interval() -> None:
    full = [1.0] * 9 + [0.0] * 51  # full prefill gains in three contexts of twenty
    gain = PairedBootstrap(full, [0.0] * 60, CONTEXTS).gain(full)
    assert (gain.pgr, gain.low, gain.high) == (1.0, None, None)


def test_a_lead_is_that_of_the_mean_scores_and_turns_with_the_sides() -> None:
    own, other = shares(0.5, 6), shares(0.8, 7)
    paired = PairedBootstrap([1.0] * 60, [0.0] * 60, CONTEXTS)
    mine, theirs = paired.by_context(own), paired.by_context(other)
    lead, back = paired_lead(theirs, mine), paired_lead(mine, theirs)
    assert lead is not None
    assert back is not None
    assert lead.mean == pytest.approx((sum(other) - sum(own)) / 60)
    assert lead.low < lead.mean < lead.high
    assert (back.mean, back.low, back.high) == pytest.approx((-lead.mean, -lead.high, -lead.low))


def test_what_two_ways_have_in_common_cancels_in_their_lead() -> None:
    contexts = [str(i) for i in range(40)]
    own = [float(i % 2) for i in range(40)]  # all or nothing: wide on its own
    other = [score + 0.1 for score in own]
    paired = PairedBootstrap([1.0] * 40, [0.0] * 40, contexts)
    lead = paired_lead(paired.by_context(other), paired.by_context(own))
    assert lead is not None
    assert (lead.low, lead.high) == pytest.approx((0.1, 0.1))


def test_of_other_questions_or_one_context_no_lead_is_known() -> None:
    assert paired_lead([(5, 4.0)], [(5, 3.0)]) is None
    assert paired_lead([(5, 4.0), (5, 4.0)], [(5, 3.0), (4, 3.0)]) is None
    assert paired_lead([(5, 4.0), (5, 4.0)], ()) is None


def test_scores_that_fit_no_question_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="expected as many"):
        PairedBootstrap([1.0], [0.0, 0.0], ["a"])
    with pytest.raises(InvalidInputError, match="expected one for each"):
        PairedBootstrap([1.0], [0.0], ["a"]).gain([1.0, 1.0])
