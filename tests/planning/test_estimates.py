"""Curves, pipelines and forecasts against cases worked out by hand."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest

from blendrag.errors import InvalidInputError
from blendrag.planning.curve import Curve, Point, fit
from blendrag.planning.forecast import Estimator, Forecast, Prompt, forecast
from blendrag.planning.parts import Loaded, Part
from blendrag.planning.pipeline import arrivals, finish
from blendrag.planning.profile import Profile, Tier
from planning.invented import CHUNK, LAYERS, evenly, line, profile, prompt

# -- curves ------------------------------------------------------------------------------------------


def test_a_fit_finds_the_terms_that_times_were_made_of() -> None:
    points = [
        Point(rows, context, placed, 2e-3 + 1e-4 * rows + 3e-8 * rows * context + 1e-6 * placed)
        for rows in (10, 50, 200, 800)
        for context, placed in ((500, 900), (1000, 400), (1500, 3000))
    ]
    curve = fit(points)
    assert curve.pair_s == pytest.approx(3e-8, rel=1e-3)
    assert curve.placed_s == pytest.approx(1e-6, rel=1e-3)
    for point in points:
        assert curve(*point[:3]) == pytest.approx(point.seconds, rel=1e-3)
    expected = 2e-3 + 1e-4 * 1600 + 3e-8 * 1600 * 800
    assert curve(1600, 800) == pytest.approx(expected, rel=1e-2)  # beyond what was measured


def test_a_fit_of_noise_never_falls_and_has_no_negative_term() -> None:
    draw = random.Random(3)
    for _ in range(50):
        points = [
            Point(rows, context, 0, draw.uniform(0.001, 0.1))
            for rows in (8, 32, 128, 512)
            for context in (100, 1000)
        ]
        curve = fit(points)
        assert min(curve.row_s, curve.pair_s, curve.placed_s) >= 0
        times = [curve(rows, 500) for rows in range(0, 2000, 7)]
        assert times == sorted(times)


def test_a_flat_beginning_is_kept_flat() -> None:
    """As on a GPU: few rows cost what many do."""
    flat = [Point(rows, 1, 0, max(1e-3, 1e-5 * rows)) for rows in (1, 30, 100, 400, 800)]
    curve = fit(flat)
    assert curve(30, 1) == pytest.approx(1e-3, rel=0.02)
    assert curve(100, 1) == pytest.approx(1e-3, rel=0.02)
    assert curve(600, 1) == pytest.approx(6e-3, rel=0.02)


def test_times_of_one_length_alone_are_taken_for_proportional_to_it() -> None:
    curve = fit([Point(128, 64, 0, 1.0), Point(128, 64, 0, 1.2)])
    assert curve(128, 64) == pytest.approx(1.1)
    assert curve(1280, 640) == pytest.approx(11.0)


def test_two_lengths_and_what_attention_costs_say_what_a_long_prefill_takes() -> None:
    def seconds(n: int) -> float:
        return 0.1 + 7e-3 * n + 2e-6 * n * n / 2

    points = [Point(n, n / 2, 0, seconds(n)) for n in (128, 256)]
    curve = fit(points, 2e-6)
    assert curve.pair_s == 2e-6
    assert curve(4096, 2048) == pytest.approx(seconds(4096), rel=0.02)
    assert fit(points)(4096, 2048) > 2 * seconds(4096)  # two lengths alone do not say it
    slow = fit(points, 1.0)  # attention that would take longer than all there is
    assert slow.row_s > 0
    assert slow(128, 64) == pytest.approx(points[0].seconds, rel=0.1)


def test_a_curve_without_points_falling_or_endless_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no time was measured"):
        fit([Point(10, 10, 0, 0.0)])
    for rows, seconds in (((), ()), ((1.0, 2.0), (2.0, 1.0)), ((2.0, 1.0), (1.0, 2.0))):
        with pytest.raises(InvalidInputError, match="measure again"):
            Curve(rows, seconds, 0.0)
    with pytest.raises(InvalidInputError, match="finite"):
        Curve((1.0,), (float("nan"),), 0.0)


def test_no_rows_cost_nothing_but_the_moving() -> None:
    assert line(1e-3, placed_s=1e-6)(0, 0, 100) == pytest.approx(1e-4)
    assert line(1e-3)(0, 0) == 0.0


# -- pipelines ---------------------------------------------------------------------------------------


def test_a_layer_begins_when_its_load_and_the_layer_before_are_done() -> None:
    assert finish(arrivals([1, 1, 1]), [2, 2, 2]) == 7  # waits for the first load alone
    assert finish(arrivals([2, 2, 2]), [1, 1, 1]) == 7  # waits for the last load
    assert finish(arrivals([5, 0, 0]), [1, 1, 1]) == 8
    assert finish(arrivals([0, 0, 5]), [1, 1, 1]) == 6
    assert finish(arrivals([0, 0, 0]), [1, 1, 1]) == 3


def test_copies_are_a_stage_of_their_own() -> None:
    assert arrivals([1, 1, 1], [2, 2, 2]) == [3, 5, 7]
    assert arrivals([2, 2, 2], [1, 1, 1]) == [3, 5, 7]


# -- forecasts ---------------------------------------------------------------------------------------


def test_a_policy_that_neither_looks_nor_asks_computes_its_rows_in_every_layer() -> None:
    """3 chunks of 100 and 20 fresh, a tenth recomputed: 50 ms a layer; 3 ms of load a layer."""
    asked = prompt()
    predicted = forecast(profile(1e6), asked, asked.parts, evenly(0.1, 300))
    assert predicted.load_s == pytest.approx(LAYERS * 3 * 1e-3)
    assert predicted.compute_s == pytest.approx(LAYERS * 0.05)
    assert predicted.ttft_s == pytest.approx(0.003 + LAYERS * 0.05)


def test_the_last_layer_is_predicted_by_a_curve_of_its_own() -> None:
    alike, cheap = profile(), profile(last=line(1e-4))
    counts = evenly(0.1, 300)
    for policy in ({}, {"scouted_layers": 2}, {"needs_deviation": True}):
        asked = prompt(**policy)
        one, other = (forecast(p, asked, asked.parts, counts) for p in (alike, cheap))
        assert one.ttft_s - other.ttft_s == pytest.approx((20 + counts[-1]) * 9e-4)
        assert one.compute_s - other.compute_s == pytest.approx((20 + counts[-1]) * 9e-4)


def test_behind_a_slow_load_only_the_last_layer_shows() -> None:
    asked = prompt()
    predicted = forecast(profile(1e4), asked, asked.parts, evenly(0.1, 300))
    assert predicted.ttft_s == pytest.approx(LAYERS * 0.3 + 0.05)


def test_a_policy_that_looks_computes_the_entry_whole_and_does_not_load_it() -> None:
    asked = prompt(needs_deviation=True)
    predicted = forecast(profile(1e4, peek_s=1e-4), asked, asked.parts, evenly(0.1, 300))
    # layer 0: 320 rows while 0.9 s of loads run; the last of three loads is awaited, then 50 ms
    assert predicted.load_s == pytest.approx(3 * 0.3)
    assert predicted.compute_s == pytest.approx(0.32 + 0.032 + 3 * 0.05)
    assert predicted.ttft_s == pytest.approx(0.9 + 0.05)


@pytest.mark.parametrize(("entering", "layers"), [(299, LAYERS), (300, LAYERS - 1)])
def test_where_all_candidates_enter_layer_0_their_kv_is_not_loaded_there(
    entering: int, layers: int
) -> None:
    made, asked = profile(1e4), prompt()
    predicted = forecast(made, asked, asked.parts, [entering, 30, 30])
    assert predicted.load_s == pytest.approx(layers * 0.3)
    scouting = prompt(
        scouted_layers=LAYERS
    )  # the scout pass reads every layer before anything is chosen
    predicted = forecast(made, scouting, scouting.parts, [entering, 30, 30])
    assert predicted.load_s == pytest.approx(LAYERS * 0.3)


def test_what_is_not_loaded_in_layer_0_is_neither_waited_for_nor_moved_there() -> None:
    made = profile(1e3, layer=line(1e-6, placed_s=1e-4))
    asked = prompt()
    few, all_enter = (forecast(made, asked, asked.parts, [entering, 0, 0]) for entering in (0, 300))
    computed = 2 * 300e-6  # in layer 0 and in layer 1, by the policy whose budget is all of them
    assert all_enter.compute_s - few.compute_s == pytest.approx(computed - 300 * 1e-4)
    assert few.ttft_s - all_enter.ttft_s == pytest.approx(
        3.0
    )  # of loading, one layer of twelve seconds


def test_an_exact_part_is_loaded_in_layer_0_also_where_all_candidates_enter_it() -> None:
    asked = prompt(chunks=2)
    first, second = asked.parts
    exact = Part(first.start, first.end, first.tier, first.layer_bytes, exact=True)
    predicted = forecast(profile(1e4), asked, (exact, second), [CHUNK, 0, 0])
    assert predicted.load_s == pytest.approx((2 * LAYERS - 1) * 0.1)


def test_a_policy_that_asks_recomputes_when_everything_is_there() -> None:
    asked = prompt(scouted_layers=LAYERS)
    predicted = forecast(profile(1e4, fixed_s=0.5), asked, asked.parts, evenly(0.1, 300))
    scout = LAYERS * 0.3 + 0.02
    assert predicted.ttft_s == pytest.approx(0.5 + scout + LAYERS * 0.05)


def test_layers_that_the_scout_pass_does_not_reach_load_while_it_recomputes() -> None:
    asked = prompt(scouted_layers=2)
    predicted = forecast(profile(1e4, fixed_s=0.5), asked, asked.parts, evenly(0.1, 300))
    assert predicted.ttft_s == pytest.approx(0.5 + LAYERS * 0.3 + 0.05)
    assert predicted.compute_s == pytest.approx(0.5 + 2 * 0.02 + LAYERS * 0.05)


def test_an_exact_part_is_loaded_and_never_recomputed() -> None:
    asked = prompt()
    exact = tuple(Part(p.start, p.end, p.tier, p.layer_bytes, exact=True) for p in asked.parts)
    predicted = forecast(profile(1e9), asked, exact, [])
    assert predicted.compute_s == pytest.approx(LAYERS * 0.02)


def test_with_nothing_loaded_it_is_a_stock_prefill() -> None:
    assert forecast(profile(), prompt(), (), []).ttft_s == pytest.approx(LAYERS * 0.32)


def test_where_cores_are_shared_reading_delays_computing() -> None:
    asked = prompt()
    tiers = (Tier("disk", 1e6, busy=0.5),)
    alone, shared = (
        forecast(profile(tiers=tiers, is_shared=s), asked, asked.parts, evenly(0.1, 300))
        for s in (False, True)
    )
    assert shared.ttft_s - alone.ttft_s == pytest.approx(LAYERS * 0.0015)


def test_copies_to_a_device_are_waited_for() -> None:
    asked = prompt()
    slow = profile(1e9, device_bytes_per_s=1e4)
    assert forecast(slow, asked, asked.parts, evenly(0.1, 300)).ttft_s == pytest.approx(1.25, 1e-3)


@pytest.mark.parametrize(
    "policy", [{}, {"scouted_layers": 2}, {"needs_deviation": True}], ids=lambda flags: str(*flags)
)
def test_sums_with_parts_added_and_taken_away_forecast_what_the_parts_themselves_do(
    policy: dict[str, bool],
) -> None:
    draw = random.Random(13)
    tiers = (Tier("disk", 1e5, read_s=1e-3, busy=0.4), Tier("memory", 1e8))
    made = profile(
        tiers=tiers, layer=line(1e-3, 1e-6, 1e-5), device_bytes_per_s=1e6, is_shared=True,
        peek_s=1e-4,
    )  # fmt: skip
    for _ in range(50):
        at, parts = 0, []
        for _ in range(6):
            tokens, tier = draw.randint(20, 200), draw.choice(("disk", "memory"))
            sizes = tuple(draw.randint(100, 5000) for _ in range(LAYERS))
            parts.append(Part(at, at + tokens, tier, sizes, exact=draw.random() < 0.3))
            at += tokens
        asked = Prompt(at + 10, tuple(parts), **policy)
        some = draw.sample(parts, draw.randint(0, 6))
        summed = Loaded.of(made, parts)
        for part in parts:
            if part not in some:
                summed = summed.minus(Loaded.of(made, [part]))
        added = Loaded.of(made, ())
        for part in some:
            added = added.plus(Loaded.of(made, [part]))
        plain = Estimator(made, asked, some)
        for fast in (Estimator(made, asked, summed), Estimator(made, asked, added)):
            assert (fast.candidates, fast.chunks) == (plain.candidates, plain.chunks)
            for share in (0.0, 0.15, 1.0):
                counts = evenly(share, plain.candidates)
                assert fast.at(counts) == approx(plain.at(counts))
                assert fast.waiting_s(counts) == pytest.approx(plain.waiting_s(counts), abs=1e-9)


def approx(made: Forecast) -> Forecast:
    return Forecast(*(pytest.approx(seconds, abs=1e-9) for seconds in astuple(made)))


def test_rows_at_the_end_of_a_prompt_see_more() -> None:
    made = profile(layer=line(0.0, pair_s=1e-6))
    asked = prompt(chunks=2)
    first, last = (forecast(made, asked, [p], evenly(0, CHUNK)).compute_s for p in asked.parts)
    assert first > last > 0  # to compute the later chunk costs more than the earlier one


def test_a_read_costs_its_latency_and_its_bytes() -> None:
    assert Tier("disk", 1e6, read_s=1e-3).seconds(1e6, 3) == pytest.approx(1.003)


def test_a_profile_survives_its_json() -> None:
    import json

    made = profile(device_bytes_per_s=1e10)
    assert Profile.of(json.loads(json.dumps(made.as_dict()))) == made


@pytest.mark.parametrize(
    "change",
    [{"peek_s": -1.0}, {"fixed_s": float("inf")}, {"layer_bytes": []}, {"version": 0}, {"tiers": []},
     {"device_bytes_per_s": 0.0}, {"layer": {"rows": [1], "seconds": [], "row_s": 0}}],
)  # fmt: skip
def test_a_damaged_profile_is_no_profile(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        Profile.of({**profile().as_dict(), **change})
