"""The serving bench: all ways answer all requests, and together means in joint steps."""

from __future__ import annotations

import math
from typing import Any

import pytest

from blendrag.serving import scheduler
from blendrag_lab.bench.serve import (
    ARRIVING_BASELINE,
    BASELINE,
    EXTREMES,
    LOOP_BASELINE,
    doubling_rate,
)
from cli.commands import refused
from lab.tests.bench.small import joint_steps, measured

SMALL = (
    "--geometry", "tiny", "--dtype", "float32", "--requests", "3", "--new-tokens", "5", "--chunks", "2",
    "--chunk-tokens", "64", "--corpus-chunks", "3",
)  # fmt: skip


def steps_after_prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of requests of each joint step, of which none runs during a prefill."""
    monkeypatch.setattr(scheduler, "PREFILL_PER_STEP", math.inf)
    return joint_steps(monkeypatch)


def test_every_way_answers_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = steps_after_prefills(monkeypatch)
    rows = {row["way"]: row for row in measured("serve", *SMALL)["rows"]}
    assert len(rows) == 6
    assert rows[BASELINE]["over_baseline"] == 1
    assert max(sizes) == 3
    served = [row for row in rows.values() if row["ttft_s"] is not None]
    assert len(served) == 5
    assert all(row["ttft_s"] <= row["p95_ttft_s"] <= row["seconds"] for row in served)


def test_requests_arrive_at_random() -> None:
    found = measured("serve", *SMALL, "--poisson", "--contexts", "1")
    full, same, faster = found["rows"]
    assert found["contexts"] == 1
    assert faster["rate"] == 4 * same["rate"] == 4 * full["rate"]
    assert full["way"] == ARRIVING_BASELINE
    assert all(0 <= row["in_time"] <= 1 for row in found["rows"])


def test_full_prefill_waits_as_long_as_it_takes_at_the_doubling_rate() -> None:
    rate = doubling_rate([0.0, 1.0, 2.0], ttft_s=1.0, total_s=2.0)
    # the second waits 2 - 1/rate, the third twice as long: 1 s on average
    assert rate == pytest.approx(1.0)


def test_kv_that_is_shared_and_not(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_after_prefills(monkeypatch)
    found = measured(
        "serve", *SMALL, "--only", "blend", "--chunks", "3", "--policy", "query", "--ratio", "0.1"
    )
    alone, together, unshared = found["rows"]
    assert alone["way"] == found["baseline"] == BASELINE
    assert alone["kv_bytes"] is None
    assert together["kv_bytes"] < together["private_kv_bytes"]
    assert unshared["kv_bytes"] == unshared["private_kv_bytes"] == together["private_kv_bytes"]


def test_a_closed_loop_beside_the_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    joint: set[tuple[float, float]] = set()
    stock = scheduler.decoded_together

    def noted(steps: Any, pool: Any) -> Any:
        if len(steps) > 1:
            joint.add((scheduler.ANSWERS_SHARE, scheduler.MAX_OVERTAKEN))
        return stock(steps, pool)

    monkeypatch.setattr(scheduler, "PREFILL_PER_STEP", math.inf)
    monkeypatch.setattr(scheduler, "ANSWERS_SHARE", 0.0)
    monkeypatch.setattr(scheduler, "decoded_together", noted)
    found = measured("serve", *SMALL, "--users", "2")
    assert [row["way"] for row in found["rows"]] == [
        LOOP_BASELINE, "blend, 2 users", *(f"blend, 2 users, {extreme}" for extreme in EXTREMES)
    ]  # fmt: skip
    assert joint == {(0, scheduler.MAX_OVERTAKEN), (0, 0)}  # none where answers come first
    for row in found["rows"]:
        assert 0 < row["prefill_s"] <= row["ttft_s"] <= row["p95_total_s"]
        assert row["token_ms"] <= row["p95_token_ms"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--users", "2", "--poisson"), "--poisson and --users, expected one of them"),
        (("--users", "two"), "users 'two': expected comma-separated whole numbers"),
    ],
)
def test_users_that_cannot_be(given: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused("bench", "serve", *SMALL, *given)
