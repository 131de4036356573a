"""Time to first token over one factor."""

from __future__ import annotations

import pytest

from blendrag.lab.bench.sweep import FACTORS, Case, make_cases
from blendrag.lab.bench.tiers import ON_DISK
from blendrag.lab.bench.workload import Workload
from cli.commands import invoke, said
from lab.bench.lab import SMALL, measured

#: Whatever the machine is fast in.
BFLOAT16 = ("--dtype", "bfloat16")
KV_BYTES = 2 * 4 * 2 * 64 * 16 * 2  # K and V, layers, KV heads, tokens, width, bfloat16


def test_sweep_is_one_object_with_a_row_for_each_ratio() -> None:
    rows = measured("sweep", *SMALL, "--ratios", "0.1,0.5,1.0")["rows"]
    assert [row["ratio"] for row in rows] == pytest.approx([0.1, 0.5, 1.0], abs=0.01)
    for row in rows:
        assert row["speedup"] == pytest.approx(row["full_ms"] / row["ms"])
        assert row["ratio"] <= row["charged_ratio"] <= 1
    assert rows[-1]["charged_ratio"] == 1
    floors = [row["floor_speedup"] for row in rows]
    assert floors == sorted(floors, reverse=True)
    assert floors[-1] < 1  # everything is computed, and the question's tokens twice
    assert len({row["full_ms"] for row in rows}) == 1  # one stock prefill for one prompt


@pytest.mark.parametrize(
    ("factor", "values", "tokens"),
    [("chunks", "1,3", [40, 104]), ("chunk-tokens", "16,64", [40, 136]),
     ("context", "80,104", [72, 104])],
)  # fmt: skip
def test_the_prompt_follows_the_factor(factor: str, values: str, tokens: list[int]) -> None:
    rows = measured("sweep", *SMALL, "--factor", factor, "--values", values)["rows"]
    assert [row["prompt_tokens"] for row in rows] == tokens
    assert [row["value"] for row in rows] == values.split(",")
    assert rows[0]["full_ms"] != rows[1]["full_ms"]  # each prompt has its own


def test_the_value_of_a_context_is_called_a_limit() -> None:
    result = invoke("bench", "sweep", *SMALL, "--factor", "context", "--values", "80")
    assert result.exit_code == 0, result.stderr
    (row,) = (line.split("│") for line in result.stdout.splitlines() if "≤" in line)
    assert [cell.strip() for cell in row[1:3]] == ["≤ 80", "72"]


def test_every_tier_reads_the_same_prompt() -> None:
    values = ("--factor", "tier", "--values", "memory,disk,9GB/s")
    rows = measured("sweep", *SMALL, *BFLOAT16, *values)["rows"]
    assert [row["value"] for row in rows] == ["memory", "disk", "9GB/s"]
    assert {row["kv_bytes"] for row in rows} == {KV_BYTES}
    assert len({row["full_ms"] for row in rows}) == 1
    assert len({row["reuse_ms"] for row in rows}) == 3


def test_an_encoding_changes_what_is_stored_and_not_what_is_computed() -> None:
    native, small = measured("sweep", *SMALL, *BFLOAT16, "--factor", "encoding")["rows"]
    assert (native["value"], small["value"]) == ("native", "int8")
    assert native["kv_bytes"] == KV_BYTES
    assert small["kv_bytes"] < 0.8 * KV_BYTES
    assert native["floor_speedup"] == small["floor_speedup"]


def test_geometries_are_named_by_the_factor() -> None:
    rows = measured("sweep", *SMALL[2:], "--factor", "geometry", "--values", "tiny")["rows"]
    assert [row["value"] for row in rows] == ["tiny"]
    result = invoke("bench", "sweep", "--geometry", "tiny", "--factor", "geometry")
    assert result.exit_code == 2
    assert "name geometries by --values" in said(result)


def test_every_factor_has_usual_values() -> None:
    base = Case("", Workload(), ON_DISK, "tiny")
    for factor in FACTORS:
        assert len(make_cases(factor, None, base)) > 1


@pytest.mark.parametrize(
    ("factor", "values", "sentence"),
    [("weather", "1", "factor 'weather' is none of"), ("chunks", "0", "chunks '0'"),
     ("chunks", "two", "chunks 'two'"), ("chunk-tokens", "-4", "chunk-tokens '-4'"),
     ("context", "20", "no room for a chunk of 32"), ("tier", "floppy", "tier 'floppy'"),
     ("encoding", "int3", "encoding 'int3'"), ("ratio", "2", "ratio 2.0 must be a number")],
)  # fmt: skip
def test_values_that_a_factor_cannot_have_are_one_sentence(
    factor: str, values: str, sentence: str
) -> None:
    result = invoke("bench", "sweep", *SMALL, "--factor", factor, "--values", values)
    assert result.exit_code == 2
    assert sentence in said(result)


def test_ratios_beside_another_factor_are_refused() -> None:
    result = invoke("bench", "sweep", *SMALL, "--factor", "chunks", "--ratios", "0.1")
    assert result.exit_code == 2
    assert "name the values of one factor" in said(result)
