"""Predicted times against cases worked out by hand."""

from __future__ import annotations

import random
from dataclasses import astuple, replace

import pytest

from blendrag.planning.estimate import Estimator, PromptParts, StoredPart, arrivals, finish
from blendrag.planning.profile import Tier
from planning.invented import CHUNK, LAYERS, evenly, forecast, line, profile, prompt

TENTH = evenly(0.1, 300)
"""Of three chunks of 100 tokens; with the 20 fresh ones 50 rows, 50 ms a layer."""


def test_a_layer_begins_when_its_load_and_the_layer_before_are_done():
    for reads, compute, done in (
        ([1, 1, 1], 2, 7),  # waits for the first load alone
        ([2, 2, 2], 1, 7),  # waits for the last load
        ([5, 0, 0], 1, 8),
        ([0, 0, 5], 1, 6),
        ([0, 0, 0], 1, 3),
    ):
        assert finish(arrivals(reads, [0, 0, 0]), [compute] * 3) == done


def test_copies_to_the_device_are_a_stage_of_their_own():
    assert arrivals([1, 1, 1], [2, 2, 2]) == [3, 5, 7]
    assert arrivals([2, 2, 2], [1, 1, 1]) == [3, 5, 7]
    slow = profile(1e9, device_bytes_per_s=1e4)
    assert forecast(slow, prompt(), TENTH).ttft_s == pytest.approx(1.25, 1e-3)


def test_a_budgeted_policy_computes_its_rows_in_every_layer():
    predicted = forecast(profile(1e6), prompt(), TENTH)
    assert predicted.load_s == pytest.approx(LAYERS * 3 * 1e-3)
    assert predicted.compute_s == pytest.approx(LAYERS * 0.05)
    assert predicted.ttft_s == pytest.approx(0.003 + LAYERS * 0.05)
    # after a slow load only the last layer shows
    assert forecast(profile(1e4), prompt(), TENTH).ttft_s == pytest.approx(LAYERS * 0.3 + 0.05)


@pytest.mark.parametrize("policy", [{}, {"scouted_layers": 2}, {"needs_deviation": True}])
def test_the_last_layer_has_a_curve_of_its_own(policy):
    one, other = (
        forecast(p, prompt(**policy), TENTH) for p in (profile(), profile(last=line(1e-4)))
    )
    assert one.ttft_s - other.ttft_s == pytest.approx((20 + TENTH[-1]) * 9e-4)
    assert one.compute_s - other.compute_s == pytest.approx((20 + TENTH[-1]) * 9e-4)


def test_a_policy_that_needs_deviations_computes_layer_0_whole_and_does_not_load_it():
    predicted = forecast(profile(1e4, peek_s=1e-4), prompt(needs_deviation=True), TENTH)
    # layer 0: 320 rows during 0.9 s of loads; the last of three loads is awaited, then 50 ms
    assert predicted.load_s == pytest.approx(3 * 0.3)
    assert predicted.compute_s == pytest.approx(0.32 + 0.032 + 3 * 0.05)
    assert predicted.ttft_s == pytest.approx(0.9 + 0.05)


@pytest.mark.parametrize(("entering", "layers"), [(299, LAYERS), (300, LAYERS - 1)])
def test_layer_0_is_not_loaded_if_all_candidates_are_computed_there(entering, layers):
    counts = [entering, 30, 30]
    assert forecast(profile(1e4), prompt(), counts).load_s == pytest.approx(layers * 0.3)
    # the scout pass reads every layer before anything is chosen
    scouting = prompt(scouted_layers=LAYERS)
    assert forecast(profile(1e4), scouting, counts).load_s == pytest.approx(LAYERS * 0.3)


def test_what_is_not_loaded_in_layer_0_is_neither_waited_for_nor_moved():
    made = profile(1e3, layer=line(1e-6, placed_s=1e-4))
    few, all_enter = (forecast(made, prompt(), [entering, 0, 0]) for entering in (0, 300))
    computed = 2 * 300e-6  # in layers 0 and 1
    assert all_enter.compute_s - few.compute_s == pytest.approx(computed - 300 * 1e-4)
    assert few.ttft_s - all_enter.ttft_s == pytest.approx(3.0)  # one of four layers of loads


def test_an_exact_part_is_always_loaded_and_never_recomputed():
    asked = prompt(chunks=2)
    mixed = replace(asked, parts=(replace(asked.parts[0], exact=True), asked.parts[1]))
    predicted = forecast(profile(1e4), mixed, [CHUNK, 0, 0])
    assert predicted.load_s == pytest.approx((2 * LAYERS - 1) * 0.1)
    exact = replace(asked, parts=tuple(replace(part, exact=True) for part in asked.parts))
    assert forecast(profile(1e9), exact, []).compute_s == pytest.approx(LAYERS * 0.02)


def test_what_is_not_recomputed_is_moved_in_every_layer_but_the_first():
    made, moved_s = profile(1e4, shift_s=1e-5), 300 * 1e-5
    for counts, layers in ((TENTH, LAYERS - 1), ([30, *[0] * (LAYERS - 2)], 1)):
        moving, staying = (forecast(made, prompt(moves_others=m), counts) for m in (True, False))
        assert moving.compute_s - staying.compute_s == pytest.approx(layers * moved_s)
    moving, staying = (forecast(made, prompt(moves_others=m), TENTH) for m in (True, False))
    # in the last layer; the others hide behind loads
    assert moving.ttft_s - staying.ttft_s == pytest.approx(moved_s)


def test_recompute_begins_after_the_scout_pass():
    made = profile(1e4, fixed_s=0.5)
    predicted = forecast(made, prompt(scouted_layers=LAYERS), TENTH)
    assert predicted.ttft_s == pytest.approx(0.5 + LAYERS * 0.3 + 0.02 + LAYERS * 0.05)
    # layers that the scout pass does not reach load during recompute
    predicted = forecast(made, prompt(scouted_layers=2), TENTH)
    assert predicted.ttft_s == pytest.approx(0.5 + LAYERS * 0.3 + 0.05)
    assert predicted.compute_s == pytest.approx(0.5 + 2 * 0.02 + LAYERS * 0.05)


@pytest.mark.parametrize(
    "policy", [{"scouted_layers": 2}, {"needs_deviation": True}, {"moves_others": True}]
)
def test_where_nothing_is_recomputed_nothing_is_done_to_choose_tokens(policy):
    made, zeros = profile(1e4, peek_s=1e-4, shift_s=1e-5), [0] * (LAYERS - 1)
    one, other = (forecast(made, asked, zeros) for asked in (prompt(**policy), prompt()))
    assert one == other
    assert one != forecast(made, prompt(**policy), [1] * (LAYERS - 1))


def test_with_nothing_loaded_it_is_a_stock_prefill():
    assert forecast(profile(), prompt(), [], loaded=()).ttft_s == pytest.approx(LAYERS * 0.32)


def test_reading_on_shared_cores_delays_computing():
    tiers = (Tier("disk", 1e6, busy=0.5),)
    alone, shared = (
        forecast(profile(tiers=tiers, is_shared=s), prompt(), TENTH) for s in (False, True)
    )
    assert shared.ttft_s - alone.ttft_s == pytest.approx(LAYERS * 0.0015)


@pytest.mark.parametrize("policy", [{}, {"scouted_layers": 2}, {"needs_deviation": True}])
def test_some_parts_loaded_are_estimated_like_a_prompt_with_only_those_stored(policy):
    draw = random.Random(13)
    tiers = (Tier("disk", 1e5, read_s=1e-3, busy=0.4), Tier("memory", 1e8))
    made = profile(
        tiers=tiers, layer=line(1e-3, 1e-6, 1e-5), device_bytes_per_s=1e6, is_shared=True,
        peek_s=1e-4,
    )  # fmt: skip
    for _ in range(20):
        at, parts = 0, []
        for _ in range(6):
            tokens, tier = draw.randint(20, 200), draw.choice(("disk", "memory"))
            sizes = tuple(draw.randint(100, 5000) for _ in range(LAYERS))
            parts.append(StoredPart(at, at + tokens, tier, sizes, exact=draw.random() < 0.3))
            at += tokens
        some = sorted(draw.sample(range(6), draw.randint(0, 6)))
        part = Estimator(made, PromptParts(at + 10, tuple(parts), **policy)).loading(some)
        alone = Estimator(
            made, PromptParts(at + 10, tuple(parts[i] for i in some), **policy)
        ).loading()
        assert (part.candidates, part.chunks) == (alone.candidates, alone.chunks)
        for share in (0.0, 0.15, 1.0):
            counts = evenly(share, part.candidates)
            assert astuple(part.at(counts)) == pytest.approx(astuple(alone.at(counts)))
            assert part.waiting_s(counts) == pytest.approx(alone.waiting_s(counts), abs=1e-9)


def test_rows_at_the_end_of_a_prompt_see_more_keys():
    made, asked = profile(layer=line(0.0, pair_s=1e-6)), prompt(chunks=2)
    first, last = (forecast(made, asked, evenly(0, CHUNK), [i]).compute_s for i in (0, 1))
    assert first > last > 0  # computing the later chunk costs more than the earlier one


def test_an_unmeasured_tier_is_an_error():
    with pytest.raises(KeyError, match="tape"):
        Estimator(profile(), prompt(tier="tape"))
