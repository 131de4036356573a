"""The automatic ratio beside fixed ones, over a profile that is invented: nothing is timed to decide."""

from __future__ import annotations

import time
from typing import Any

import pytest

from blendrag.lab.bench import auto
from blendrag.lab.bench.auto import AutoBench, with_tier
from blendrag.lab.bench.auto_results import Run, tier_result
from blendrag.lab.bench.tiers import parse_tier
from blendrag.lab.bench.ttft import TtftBench
from blendrag.planning.controller import Controller
from blendrag.planning.profile import Curve, Profile, Tier, conditions_of
from cli.commands import invoke, said
from lab.bench.lab import measured

LAYERS = 4
SMALL = (
    "--geometry", "tiny", "--chunks", "2", "--chunk-tokens", "32", "--question-tokens", "8",
    "--rounds", "1", "--policy", "random",
)  # fmt: skip


def line(row_s: float) -> Curve:
    return Curve((1.0, 4096.0), (row_s, 4096 * row_s), row_s)


def invented(bench: TtftBench, tick: Any, row_s: float = 1e-6) -> Profile:
    """A fast disk, and a microsecond for a row and layer."""
    adapter = bench.adapter
    return Profile(
        conditions=conditions_of(adapter, adapter.identity.namespace),
        prefill=line(LAYERS * row_s),
        layer=line(row_s),
        last=line(row_s),
        scout=line(row_s),
        peek_s=0.0,
        fixed_s=0.0,
        tiers=(Tier("disk", 1e12, busy=1.0), Tier("memory", 1e12)),
        device_bytes_per_s=None,
        is_shared=False,
        chunk_tokens=32,
        layer_bytes=tuple(adapter.layout.layer_bytes(i, 32) for i in range(LAYERS)),
        took_s=1.0,
        measured={},
    )


@pytest.fixture(autouse=True)
def _profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "measure_profile", invented)


def test_auto_stands_beside_every_fixed_ratio_and_is_compared_with_the_fastest() -> None:
    fields = measured("auto", *SMALL, "--tiers", "memory,disk", "--ratios", "0.5,0.15,1")
    assert [tier["tier"] for tier in fields["tiers"]] == ["memory", "disk"]
    for tier in fields["tiers"]:
        assert [row["asked"] for row in tier["rows"]] == ["0.15", "0.5", "1", "auto"]
        fixed = {row["ms"]: row["ratio"] for row in tier["rows"][:-1]}
        assert tier["best_ms"] == min(fixed)
        assert tier["best_ratio"] == fixed[min(fixed)]
        assert tier["relative"] == pytest.approx(tier["auto_ms"] / tier["best_ms"])
        assert tier["rows"][-1]["ratio"] == pytest.approx(
            0.15, abs=0.01
        )  # nothing hides behind this disk
    assert fields["requests"] == 2 * 4


def test_behind_a_store_slower_than_computing_auto_computes_and_fixed_ratios_load() -> None:
    (tier,) = measured("auto", *SMALL, "--tiers", "1MB/s", "--ratios", "0.15,0.5")["tiers"]
    assert [row["loaded"] for row in tier["rows"]] == [2, 2, 0]
    size_ms = 2 * LAYERS * 2 * 32 * 2 * 16 * 2 / 1e3
    for row in tier["rows"][:2]:
        assert row["ms"] >= 0.99 * size_ms
        assert row["predicted_ms"] >= 0.99 * size_ms
    assert tier["rows"][-1]["predicted_ms"] < size_ms


def test_a_throttled_tier_is_in_the_profile_under_its_name_and_no_faster_than_the_disk() -> None:
    class Bench:
        def __init__(self) -> None:
            from blendrag.lab.bench.geometry import bench_adapter

            self.adapter = bench_adapter("tiny", None, "float32", "cpu")

    profile = invented(Bench(), None)  # type: ignore[arg-type]
    slow = with_tier(profile, parse_tier("0.5GB/s")).tier("0.5GB/s")
    assert slow == Tier("0.5GB/s", 5e8, busy=5e-4)
    fast = with_tier(profile, parse_tier("5TB/s")).tier("5TB/s")
    assert fast == Tier("5TB/s", 1e12, busy=1.0)
    assert with_tier(profile, parse_tier("disk")) is profile


def test_what_opening_and_deciding_took_is_in_the_prediction_as_in_an_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = measured("auto", *SMALL, "--tiers", "disk", "--ratios", "0.15")["tiers"][0]["rows"][0]
    plan = Controller.plan

    def slowly(*args: Any) -> Any:
        time.sleep(0.2)
        return plan(*args)

    monkeypatch.setattr(Controller, "plan", slowly)
    slow = measured("auto", *SMALL, "--tiers", "disk", "--ratios", "0.15")["tiers"][0]["rows"][0]
    assert slow["predicted_ms"] >= 200
    assert slow["ms"] >= slow["predicted_ms"] > quick["predicted_ms"]


def test_every_round_begins_with_another_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    run, order = AutoBench.run, []

    def noting(self: AutoBench, ratio: float | None) -> Run:
        order.append(ratio)
        return run(self, ratio)

    monkeypatch.setattr(AutoBench, "run", noting)
    fields = measured("auto", *SMALL, "--rounds", "2", "--tiers", "disk", "--ratios", "0.15,0.5")
    assert order == [0.15, 0.5, None, 0.5, None, 0.15, None, 0.15, 0.5]
    assert fields["requests"] == 6  # the first round warms up
    assert fields["profile"]["layer"]["row_s"] == 1e-6


def test_how_close_predictions_are_is_said_of_all_requests_and_of_the_automatic_ones() -> None:
    near, far = Run(1.0, 1.1, 0.15, 2), Run(1.0, 2.0, 0.15, 2)
    found = tier_result(parse_tier("disk"), [(0.15, [near, far]), (None, [near, near])])
    assert (found.close, found.auto_close) == (0.75, 1.0)


@pytest.mark.parametrize(
    ("predicted_s", "is_close"),
    [(1.0, True), (1.149, True), (0.851, True), (1.16, False), (0.8, False)],
)
def test_a_prediction_is_close_within_15_percent_of_what_was_measured(
    predicted_s: float, is_close: bool
) -> None:
    assert Run(1.0, predicted_s, 0.15, 2).is_close == is_close


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [(("--tiers", "floppy"), "tier 'floppy'"), (("--ratios", "much"), "ratio 'much'"),
     (("--ratios", "0.05,0.1"), "ratios 0.05, 0.1 hold none of 0.15 or more")],
)  # fmt: skip
def test_what_cannot_be_compared_is_one_sentence(wrong: tuple[str, ...], sentence: str) -> None:
    result = invoke("bench", "auto", *SMALL, *wrong)
    assert result.exit_code == 2
    assert sentence in said(result)
