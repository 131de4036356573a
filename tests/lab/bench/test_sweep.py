"""TTFT over one factor."""

from __future__ import annotations

import pytest

from blendrag.lab.bench.sweep import FACTORS, SweepCase, make_cases
from blendrag.lab.bench.tiers import ON_DISK
from blendrag.lab.bench.workload import Workload
from lab.bench.small import SMALL, measured, printed

KV_BYTES = 2 * 4 * 2 * 64 * 16 * 2  # K and V, layers, KV heads, tokens, width, bfloat16


def test_a_sweep_over_the_ratio_has_a_row_for_each_value() -> None:
    fields = measured("sweep", *SMALL, "--values", "0.1,0.5,1.0")
    rows = fields["rows"]
    assert [row["ratio"] for row in rows] == pytest.approx([0.1, 0.5, 1.0], abs=0.01)
    for row in rows:
        assert row["speedup"] == pytest.approx(row["full_ms"]["median"] / row["blend_ms"]["median"])
    floors = [row["floor_speedup"] for row in rows]
    assert floors == sorted(floors, reverse=True)
    assert floors[-1] < 1  # everything is computed, and the question's tokens twice
    assert all(
        row["full_ms"] == rows[0]["full_ms"] for row in rows
    )  # one stock prefill for one prompt
    assert fields["about"] == ["tiny, 2 × 32 + 8 tokens", "query at r = …, native KV from disk"]


@pytest.mark.parametrize(
    ("factor", "values", "tokens", "about"),
    [("chunks", "1,3", [40, 104], "tiny, … × 32 + 8 tokens"),
     ("chunk-tokens", "16,64", [40, 136], "tiny, 2 × … + 8 tokens"),
     ("context", "80,104", [72, 104], "tiny, … × 32 + 8 tokens"),
     ("geometry", "tiny,deep", [72, 72], "…, 2 × 32 + 8 tokens")],
)  # fmt: skip
def test_the_prompt_follows_the_factor(
    factor: str, values: str, tokens: list[int], about: str
) -> None:
    given = SMALL[2:] if factor == "geometry" else SMALL
    fields = measured("sweep", *given, "--factor", factor, "--values", values)
    assert [row["prompt_tokens"] for row in fields["rows"]] == tokens
    assert [row["value"] for row in fields["rows"]] == values.split(",")
    assert fields["rows"][0]["full_ms"] != fields["rows"][1]["full_ms"]  # one for each prompt
    assert fields["about"][0] == about


def test_every_tier_reads_the_same_prompt() -> None:
    rows = printed("sweep-tier")["rows"]
    assert [row["value"] for row in rows] == ["memory", "disk"]
    assert {row["kv_bytes"] for row in rows} == {KV_BYTES}
    assert rows[0]["full_ms"] == rows[1]["full_ms"]
    assert rows[0]["reuse_ms"] != rows[1]["reuse_ms"]


def test_an_encoding_changes_what_is_stored_and_not_what_is_computed() -> None:
    native, small = measured("sweep", *SMALL, "--dtype", "bfloat16", "--factor", "encoding")["rows"]
    assert (native["value"], small["value"]) == ("native", "int8")
    assert native["kv_bytes"] == KV_BYTES
    assert small["kv_bytes"] < 0.8 * KV_BYTES
    assert native["floor_speedup"] == small["floor_speedup"]


@pytest.mark.parametrize("factor", FACTORS)
def test_every_factor_has_default_values(factor: str) -> None:
    assert len(make_cases(factor, None, SweepCase("", Workload(), ON_DISK, "tiny"))) > 1
