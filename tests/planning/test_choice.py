"""Chosen ratios and loads, on invented profiles and against trying everything."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from blendrag.planning.choice import HIDDEN_SLACK, MIN_SPEEDUP_SHARE, RATIO_STEP
from blendrag.planning.estimate import Forecast, PromptParts, StoredPart
from blendrag.planning.profile import Curve, Profile, Tier
from planning.invented import CHUNK, LAYER_BYTES, LAYERS, chosen, evenly, line, profile, prompt
from planning.invented import forecast as forecast_of


def at(made: Profile, asked: PromptParts, ratio: float, loaded: tuple[int, ...]) -> Forecast:
    candidates = sum(asked.parts[i].tokens for i in loaded)
    return forecast_of(made, asked, evenly(ratio, candidates), loaded)


def best_s(made: Profile, asked: PromptParts) -> float:
    """The fastest of all sets of parts, at the smallest ratio."""
    every = range(len(asked.parts))
    sets = (some for n in range(len(every) + 1) for some in combinations(every, n))
    return min(at(made, asked, 0.15, some).ttft_s for some in sets)


# -- ratio -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_per_s", [2.2e4, 5e4, 1e6])
@pytest.mark.parametrize(
    "flags", [{}, {"needs_deviation": True}, {"scouted_layers": 2}, {"scouted_layers": LAYERS}]
)
def test_the_ratio_is_the_largest_that_hides_or_the_smallest(bytes_per_s, flags):
    made, asked = profile(bytes_per_s), prompt(fresh=1, **flags)
    found = chosen(made, asked)
    assert found.loaded
    least = at(made, asked, 0.15, found.loaded)

    def is_hidden(ratio: float) -> bool:
        more = at(made, asked, ratio, found.loaded)
        longer, added = more.ttft_s - least.ttft_s, more.compute_s - least.compute_s
        return longer <= HIDDEN_SLACK * least.ttft_s + 1e-9 and longer <= added / 2 + 1e-9

    hiding = [ratio for ratio in (i * RATIO_STEP for i in range(15, 101)) if is_hidden(ratio)]
    assert found.ratio == pytest.approx(max(hiding, default=0.15))
    assert flags or bytes_per_s > 1e5 or found.ratio > 0.15
    assert found.forecast == at(made, asked, found.ratio, found.loaded)


@pytest.mark.parametrize("scouted_layers", [0, LAYERS])
@pytest.mark.parametrize("bytes_per_s", [1e12, 1e6])
def test_recompute_that_takes_no_time_is_not_said_to_hide(bytes_per_s, scouted_layers):
    """Flat up to 146 rows: 20 are fresh, and .42 of 300 are 126."""
    flat = Curve((146.0, 147.0), (0.1, 0.2), 1e-3)
    made = profile(bytes_per_s, layer=flat, prefill=line(1.0))
    found = chosen(made, prompt(scouted_layers=scouted_layers))
    assert found.ratio == pytest.approx(0.42)
    why = "the largest that is computed in no more time than the smallest"
    assert found.reason == f"ratio 0.42: {why}"


@pytest.mark.parametrize("least", [0.0, 0.4, 1.0])
def test_the_ratio_is_never_below_the_smallest(least):
    for bytes_per_s in (2e4, 1e6):
        assert chosen(profile(bytes_per_s), prompt(fresh=1), least).ratio >= least


def test_the_ratio_of_a_policy_without_budget_stays():
    found = chosen(
        profile(2.2e4), prompt(fresh=1), counts=lambda *of: [30] * (LAYERS - 1), budgeted=False
    )
    assert found.ratio == 0.15
    assert "the same tokens at any ratio" in found.reason


# -- load or compute ---------------------------------------------------------------------------------


def test_everything_is_loaded_from_a_fast_disk_and_nothing_from_a_slow_one():
    assert chosen(profile(1e7), prompt()).loaded == (0, 1, 2)
    assert chosen(profile(1e7), prompt(tier="disk-cold")).loaded == (0, 1, 2)  # not measured
    made, asked = profile(1e2), prompt()
    found = chosen(made, asked)
    assert found.loaded == ()
    assert found.forecast.ttft_s == pytest.approx(made.prefill_s(asked.tokens))
    assert found.load_all_s > 50 * found.forecast.ttft_s


def test_parts_in_a_slow_tier_are_computed_and_those_in_a_fast_one_loaded():
    made = profile(tiers=(Tier("memory", 1e9), Tier("disk", 4e3)))
    asked = prompt(chunks=4)
    parts = [
        replace(p, tier="disk" if i in (1, 2) else "memory") for i, p in enumerate(asked.parts)
    ]
    assert chosen(made, replace(asked, parts=tuple(parts))).loaded == (0, 3)


@pytest.mark.parametrize("alike", [True, False])
def test_no_set_of_parts_is_much_faster_than_the_one_chosen(alike):
    draw = random.Random(5)
    for _ in range(30):
        tiers = tuple(Tier(name, 10 ** draw.uniform(3.5, 6)) for name in ("memory", "disk"))
        made = profile(tiers=tiers)
        position, parts = 0, []
        for _ in range(5):
            tokens = CHUNK if alike else draw.randint(20, 200)
            sizes = (LAYER_BYTES * tokens // CHUNK,) * LAYERS
            tier = draw.choice(tiers).name
            parts.append(StoredPart(position, position + tokens, tier, sizes))
            position += tokens
        asked = PromptParts(position + draw.choice((1, 30)), tuple(parts))
        fastest = best_s(made, asked)
        found = at(made, asked, 0.15, chosen(made, asked).loaded)
        assert found.ttft_s <= fastest / (1 - MIN_SPEEDUP_SHARE) * (1.0 if alike else 1.05) + 1e-9


def test_a_prompt_without_stored_parts_is_prefilled():
    found = chosen(profile(), PromptParts(50, ()))
    assert found.loaded == ()
    assert found.forecast.ttft_s == pytest.approx(profile().prefill_s(50))
