"""TTFT over one factor."""

from __future__ import annotations

import pytest

from blendrag.lab.bench.sweep import FACTORS, SweepCase, make_cases
from blendrag.lab.bench.tiers import ON_DISK
from blendrag.lab.bench.workload import Workload
from cli.commands import invoke, said
from lab.bench.small import SMALL, measured, printed

KV_BYTES = 2 * 4 * 2 * 64 * 16 * 2  # K and V, layers, KV heads, tokens, width, bfloat16


def test_a_sweep_over_the_ratio_has_a_row_for_each_value() -> None:
    fields = measured("sweep", *SMALL, "--values", "0.1,0.5,1.0")
    rows = fields["rows"]
    assert [row["ratio"] for row in rows] == pytest.approx([0.1, 0.5, 1.0], abs=0.01)
    for row in rows:
        assert row["speedup"] == pytest.approx(row["full_ms"] / row["ms"])
        assert row["ratio"] <= row["charged_ratio"] <= 1
    assert rows[-1]["charged_ratio"] == 1
    floors = [row["floor_speedup"] for row in rows]
    assert floors == sorted(floors, reverse=True)
    assert floors[-1] < 1  # everything is computed, and the question's tokens twice
    assert len({row["full_ms"] for row in rows}) == 1  # one stock prefill for one prompt
    assert fields["about"] == ["tiny, 2 × 32 + 8 tokens", "query at r = …, native KV from disk"]


@pytest.mark.parametrize(
    ("factor", "values", "tokens", "about"),
    [("chunks", "1,3", [40, 104], "tiny, … × 32 + 8 tokens"),
     ("chunk-tokens", "16,64", [40, 136], "tiny, 2 × … + 8 tokens"),
     ("context", "80,104", [72, 104], "tiny, … × 32 + 8 tokens")],
)  # fmt: skip
def test_the_prompt_follows_the_factor(
    factor: str, values: str, tokens: list[int], about: str
) -> None:
    fields = measured("sweep", *SMALL, "--factor", factor, "--values", values)
    assert [row["prompt_tokens"] for row in fields["rows"]] == tokens
    assert [row["value"] for row in fields["rows"]] == values.split(",")
    assert fields["rows"][0]["full_ms"] != fields["rows"][1]["full_ms"]  # one for each prompt
    assert fields["about"][0] == about


def test_every_tier_reads_the_same_prompt() -> None:
    rows = printed("sweep-tier")["rows"]
    assert [row["value"] for row in rows] == ["memory", "disk"]
    assert {row["kv_bytes"] for row in rows} == {KV_BYTES}
    assert len({row["full_ms"] for row in rows}) == 1
    assert len({row["reuse_ms"] for row in rows}) == 2


def test_an_encoding_changes_what_is_stored_and_not_what_is_computed() -> None:
    native, small = measured("sweep", *SMALL, "--dtype", "bfloat16", "--factor", "encoding")["rows"]
    assert (native["value"], small["value"]) == ("native", "int8")
    assert native["kv_bytes"] == KV_BYTES
    assert small["kv_bytes"] < 0.8 * KV_BYTES
    assert native["floor_speedup"] == small["floor_speedup"]


def test_geometries_are_values_of_the_factor() -> None:
    rows = measured("sweep", *SMALL[2:], "--factor", "geometry", "--values", "tiny")["rows"]
    assert [row["value"] for row in rows] == ["tiny"]
    result = invoke("bench", "sweep", "--geometry", "tiny", "--factor", "geometry")
    assert result.exit_code == 2
    assert "name geometries with --values" in said(result)


@pytest.mark.parametrize("factor", FACTORS)
def test_every_factor_has_default_values(factor: str) -> None:
    assert len(make_cases(factor, None, SweepCase("", Workload(), ON_DISK, "tiny"))) > 1


@pytest.mark.parametrize(
    ("factor", "values", "sentence"),
    [("weather", "1", "factor 'weather' is none of"), ("chunks", "0", "chunks '0'"),
     ("chunks", "two", "chunks 'two'"), ("chunk-tokens", "-4", "chunk-tokens '-4'"),
     ("context", "20", "no room for a chunk of 32"), ("tier", "floppy", "tier 'floppy'"),
     ("encoding", "int3", "encoding 'int3'"), ("ratio", "2", "ratio '2'"), ("ratio", "", "ratio ''"),
     ("ratio", "0.1,much", "ratio 'much'"), ("ratio", "nan", "ratio 'nan'")],
)  # fmt: skip
def test_bad_values_are_refused_in_one_sentence(factor: str, values: str, sentence: str) -> None:
    result = invoke("bench", "sweep", *SMALL, "--factor", factor, "--values", values)
    assert result.exit_code == 2
    assert sentence in said(result)
