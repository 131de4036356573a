"""The automatic ratio against fixed ones, with an invented profile: no decision depends on the machine."""

from __future__ import annotations

import time
from typing import Any

import pytest

from blendrag.planning.controller import Controller
from blendrag.planning.profile import Tier
from blendrag_lab.bench import auto
from blendrag_lab.bench.auto import AutoRun, tier_result, with_tier
from blendrag_lab.bench.tiers import ON_DISK, parse_tier
from blendrag_lab.bench.workload import Workload
from lab.tests.bench.small import LAYERS, SMALL, invented_profile, measured, printed, tiny_bench

COMMAND = ("auto", *SMALL, "--policy", "random")


@pytest.fixture(autouse=True)
def _profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "measure_profile", invented_profile)


def test_every_tier_has_all_fixed_ratios_and_the_automatic_one():
    fields = printed("auto")
    assert [tier["tier"] for tier in fields["tiers"]] == ["memory", "disk"]
    for tier in fields["tiers"]:
        ratios = [row["ratio"] for row in (*tier["fixed"], tier["auto"])]
        # This disk hides no computing, so the automatic ratio is the smallest.
        assert ratios == pytest.approx([0.15, 0.5, 1, 0.15], abs=0.01)


def test_with_a_store_slower_than_computing_auto_computes_and_fixed_ratios_load():
    (tier,) = measured(*COMMAND, "--tiers", "1MB/s", "--ratios", "0.15,0.5")["tiers"]
    assert [row["loaded"] for row in (*tier["fixed"], tier["auto"])] == [2, 2, 0]
    size_ms = 2 * LAYERS * 2 * 32 * 2 * 16 * 2 / 1e3
    for row in tier["fixed"]:
        assert min(row["ms"]["low"], row["predicted_ms"]) >= 0.99 * size_ms


def test_a_throttled_tier_enters_the_profile_no_faster_than_the_disk():
    with tiny_bench(Workload(1, 32, 8)) as bench:
        profile = invented_profile(bench)
    slow = with_tier(profile, parse_tier("0.5GB/s")).tier("0.5GB/s")
    assert slow == Tier("0.5GB/s", 5e8, busy=5e-4)
    fast = with_tier(profile, parse_tier("5TB/s")).tier("5TB/s")
    assert fast == Tier("5TB/s", 1e12, busy=1.0)
    assert with_tier(profile, ON_DISK) is profile


def test_a_prediction_includes_opening_and_deciding(monkeypatch):
    plan = Controller.plan

    def slowly(*args: Any) -> Any:
        time.sleep(0.2)
        return plan(*args)

    monkeypatch.setattr(Controller, "plan", slowly)
    row = measured(*COMMAND, "--tiers", "disk", "--ratios", "0.15")["tiers"][0]["fixed"][0]
    assert row["ms"]["median"] >= row["predicted_ms"] >= 200


def test_auto_is_compared_with_the_fastest_fixed_ratio():
    near, far = AutoRun(1.0, 1.1, 0.15, 2), AutoRun(1.0, 2.0, 0.15, 2)
    slow = AutoRun(2.0, 2.0, 0.5, 2)
    found = tier_result(ON_DISK, {0.5: [slow, slow], 0.15: [near, far], None: [slow, slow]})
    assert found.close == pytest.approx(5 / 6)
    assert (found.best.ratio, found.relative) == (0.15, 2.0)


def test_a_prediction_within_15_percent_is_close():
    predictions = [AutoRun(1.0, s, 0.15, 2) for s in (0.84, 0.851, 1.149, 1.16)]
    assert [each.is_close for each in predictions] == [False, True, True, False]
