"""Ratio, loads and schedule by invented profiles, and against trying everything."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from blendrag.planning.choice import HIDDEN_SLACK, STEP, WORTH, choose
from blendrag.planning.curve import Curve
from blendrag.planning.forecast import Forecast, Prompt, forecast
from blendrag.planning.parts import Part
from blendrag.planning.profile import Profile, Tier
from planning.invented import CHUNK, LAYER_BYTES, LAYERS, evenly, line, profile, prompt, wish


def at(made: Profile, asked: Prompt, ratio: float, loaded: tuple[Part, ...]) -> Forecast:
    candidates = sum(part.tokens for part in loaded)
    return forecast(made, asked, loaded, evenly(ratio, candidates))


def ttft_s(
    made: Profile, asked: Prompt, ratio: float, parts: tuple[Part, ...] | None = None
) -> float:
    return at(made, asked, ratio, asked.parts if parts is None else parts).ttft_s


# -- ratio -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_per_s", [2e4, 3e4, 5e4, 1e5, 1e6, 1e9])
@pytest.mark.parametrize("flags", [{}, {"needs_deviation": True}, {"scouted_layers": 2}])
def test_the_ratio_is_the_largest_that_hides_or_the_least(
    bytes_per_s: float, flags: dict[str, bool]
) -> None:
    made, asked = profile(bytes_per_s), prompt(**flags)
    found = choose(made, asked, wish())
    parts = tuple(asked.parts[i] for i in found.loaded)
    if not parts:
        pytest.skip("nothing is loaded here; see below")
    least = at(made, asked, 0.15, parts)

    def is_hidden(ratio: float) -> bool:
        more = at(made, asked, ratio, parts)
        longer, added = more.ttft_s - least.ttft_s, more.compute_s - least.compute_s
        return longer <= HIDDEN_SLACK * least.ttft_s + 1e-9 and longer <= added / 2 + 1e-9

    hiding = [ratio for ratio in (i * STEP for i in range(15, 101)) if is_hidden(ratio)]
    assert found.ratio == pytest.approx(max(hiding, default=0.15))
    assert found.forecast.ttft_s == pytest.approx(ttft_s(made, asked, found.ratio, parts))


def test_a_slow_load_hides_more_than_the_least_ratio_and_a_fast_one_does_not() -> None:
    asked = prompt(fresh=1)
    slow = choose(profile(2.2e4), asked, wish())
    assert len(slow.loaded) == 3
    assert slow.ratio > 0.15
    assert "hides behind the load" in slow.reason
    fast = choose(profile(1e9), asked, wish())
    assert fast.ratio == 0.15
    assert "smallest that keeps quality" in fast.reason


@pytest.mark.parametrize("scouted_layers", [0, LAYERS])
def test_where_few_rows_take_as_long_as_many_nothing_is_said_of_a_load_they_hide_behind(
    scouted_layers: int,
) -> None:
    """Flat up to 146 rows: 20 are fresh, and .42 of 300 are 126."""
    flat = Curve((146.0, 147.0), (0.1, 0.2), 1e-3)
    for bytes_per_s in (1e12, 1e6):
        made = profile(bytes_per_s, layer=flat, prefill=line(1.0))
        found = choose(made, prompt(scouted_layers=scouted_layers), wish())
        assert found.ratio == pytest.approx(0.42)
        assert found.reason == (
            "ratio 0.42: the largest that is computed in no more time than the smallest"
        )


def test_where_loading_is_over_before_recompute_begins_nothing_hides() -> None:
    assert choose(profile(2.5e4), prompt(fresh=1, scouted_layers=LAYERS), wish()).ratio == 0.15


def test_the_least_ratio_is_never_gone_below() -> None:
    for least in (0.0, 0.15, 0.4, 1.0):
        for speed in (2e4, 1e6):
            assert choose(profile(speed), prompt(fresh=1), wish(least)).ratio >= least


def test_a_policy_without_budget_is_left_alone() -> None:
    asked = replace(wish(counts=lambda *of: [30] * (LAYERS - 1)), is_budgeted=False)
    found = choose(profile(2.2e4), prompt(fresh=1), asked)
    assert found.ratio == 0.15
    assert "whatever the ratio" in found.reason


# -- load or compute ---------------------------------------------------------------------------------


def test_a_fast_disk_has_everything_loaded() -> None:
    assert choose(profile(1e7), prompt(), wish()).loaded == (0, 1, 2)


def test_a_disk_slower_than_computing_has_nothing_loaded() -> None:
    made, asked = profile(1e2), prompt()
    found = choose(made, asked, wish())
    assert found.loaded == ()
    assert found.forecast.ttft_s == pytest.approx(made.prefill_s(asked.tokens))
    assert found.load_all_s > 50 * found.forecast.ttft_s


def test_a_disk_in_between_has_a_part_loaded() -> None:
    found = choose(profile(1e4), prompt(chunks=6), wish())
    assert 0 < len(found.loaded) < 6
    assert found.forecast.ttft_s < (1 - WORTH) * found.load_all_s


def test_what_lies_in_the_slow_tier_is_computed_and_not_what_lies_in_the_fast_one() -> None:
    made = profile(tiers=(Tier("memory", 1e9), Tier("disk", 4e3)))
    asked = prompt(chunks=4)
    parts = tuple(
        replace(p, tier="disk" if i in (1, 2) else "memory") for i, p in enumerate(asked.parts)
    )
    assert choose(made, replace(asked, parts=parts), wish()).loaded == (0, 3)


def test_no_set_of_equal_chunks_is_faster_than_the_one_chosen() -> None:
    draw = random.Random(5)
    for _ in range(30):
        tiers = tuple(Tier(name, 10 ** draw.uniform(3.5, 6)) for name in ("memory", "disk"))
        made = profile(tiers=tiers)
        asked = prompt(chunks=5, fresh=draw.choice((1, 30)))
        asked = replace(
            asked, parts=tuple(replace(p, tier=draw.choice(tiers).name) for p in asked.parts)
        )
        found = choose(made, asked, wish())
        chosen = ttft_s(made, asked, 0.15, tuple(asked.parts[i] for i in found.loaded))
        best = min(
            ttft_s(made, asked, 0.15, chosen_parts)
            for count in range(6)
            for chosen_parts in combinations(asked.parts, count)
        )
        assert chosen <= best / (1 - WORTH) + 1e-9


def test_chunks_of_any_length_are_chosen_nearly_as_well_as_by_trying_all_sets() -> None:
    draw = random.Random(11)
    for _ in range(30):
        made = profile(tiers=(Tier("disk", 10 ** draw.uniform(3.5, 5)),))
        at, parts = 0, []
        for _ in range(5):
            tokens = draw.randint(20, 200)
            sizes = (LAYER_BYTES * tokens // CHUNK,) * LAYERS
            parts.append(Part(at, at + tokens, "disk", sizes))
            at += tokens
        asked = Prompt(at + 10, tuple(parts))
        found = choose(made, asked, wish())
        chosen = ttft_s(made, asked, 0.15, tuple(parts[i] for i in found.loaded))
        best = min(
            ttft_s(made, asked, 0.15, some) for n in range(6) for some in combinations(parts, n)
        )
        assert chosen <= 1.15 * best


def what_to_load_slowly(made: Profile, asked: Prompt) -> tuple[int, ...]:
    """The same sets, each forecast from its parts alone."""

    def seconds(chosen: tuple[int, ...]) -> float:
        return ttft_s(made, asked, 0.15, tuple(asked.parts[i] for i in chosen))

    def load_s(part: Part) -> float:
        tier = made.tier(part.tier)
        assert tier is not None
        return tier.seconds(sum(part.layer_bytes), LAYERS) / part.tokens

    every = tuple(range(len(asked.parts)))
    least, tried = at(made, asked, 0.15, asked.parts), [every, ()]
    if least.ttft_s - least.compute_s > WORTH * least.ttft_s:
        slowest = sorted(every, key=lambda i: -load_s(asked.parts[i]))
        tried = [tuple(sorted(slowest[n:])) for n in range(len(every) + 1)]
        fastest = min(tried, key=seconds)
        tried += [tuple(sorted({*fastest} ^ {i})) for i in every]
    best = min(tried, key=seconds)
    return best if seconds(best) <= (1 - WORTH) * seconds(every) else every


@pytest.mark.parametrize("flags", [{}, {"needs_deviation": True}, {"scouted_layers": 2}])
def test_the_parts_chosen_by_sums_are_those_chosen_from_the_parts_themselves(
    flags: dict[str, bool],
) -> None:
    draw = random.Random(17)
    found = []
    for _ in range(40):
        tiers = tuple(Tier(name, 10 ** draw.uniform(3.5, 6)) for name in ("memory", "disk"))
        made = profile(tiers=tiers, layer=line(1e-3, pair_s=1e-6))
        position, parts = 0, []
        for _ in range(12):
            tokens = draw.randint(20, 200)
            sizes = (LAYER_BYTES * tokens // CHUNK + draw.randint(0, 200),) * LAYERS
            tier = draw.choice(tiers).name
            parts.append(Part(position, position + tokens, tier, sizes))
            position += tokens
        asked = Prompt(position + 10, tuple(parts), **flags)
        found.append(choose(made, asked, wish()).loaded)
        assert found[-1] == what_to_load_slowly(made, asked)
    assert len({len(loaded) for loaded in found}) > 2


def test_a_prompt_of_nothing_stored_is_prefilled() -> None:
    found = choose(profile(), Prompt(50, ()), wish())
    assert found.loaded == ()
    assert found.forecast.ttft_s == pytest.approx(profile().prefill_s(50))


def test_a_tier_that_was_not_measured_is_named() -> None:
    with pytest.raises(KeyError, match="tape"):
        choose(profile(), prompt(tier="tape"), wish())


def test_a_cold_disk_that_was_not_measured_counts_as_a_disk() -> None:
    assert choose(profile(1e7), prompt(tier="disk-cold"), wish()).loaded == (0, 1, 2)
