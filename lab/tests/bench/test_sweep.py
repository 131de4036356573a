"""TTFT over one factor, and its figure."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from blendrag_lab.bench.rounds import Timing
from blendrag_lab.bench.sweep import (
    FACTORS,
    SweepCase,
    SweepResult,
    SweepRow,
    make_cases,
    sweep_figure,
)
from blendrag_lab.bench.tiers import ON_DISK
from blendrag_lab.bench.workload import Workload
from lab.tests.bench.small import SMALL, measured, printed

KV_BYTES = 2 * 4 * 2 * 64 * 16 * 2  # K and V, layers, KV heads, tokens, width, bfloat16


def test_a_sweep_over_the_ratio_has_a_row_for_each_value():
    fields = measured("sweep", *SMALL, "--values", "0.1,0.5,1.0")
    rows = fields["rows"]
    assert [row["ratio"] for row in rows] == pytest.approx([0.1, 0.5, 1.0], abs=0.01)
    for row in rows:
        assert row["speedup"] == pytest.approx(row["full_ms"]["median"] / row["blend_ms"]["median"])
        assert row["full_ms"] == rows[0]["full_ms"]  # one stock prefill for one prompt
    floors = [row["floor_speedup"] for row in rows]
    assert floors == sorted(floors, reverse=True)
    assert floors[-1] < 1  # everything is computed, and the question's tokens twice
    assert fields["about"] == ["tiny, 2 × 32 + 8 tokens", "query at r = …, native KV from disk"]


@pytest.mark.parametrize(
    ("factor", "values", "tokens", "about"),
    [("chunks", "1,3", [40, 104], "tiny, … × 32 + 8 tokens"),
     ("chunk-tokens", "16,64", [40, 136], "tiny, 2 × … + 8 tokens"),
     ("context", "80,104", [72, 104], "tiny, … × 32 + 8 tokens"),
     ("geometry", "tiny,deep", [72, 72], "…, 2 × 32 + 8 tokens")],
)  # fmt: skip
def test_the_prompt_follows_the_factor(factor, values, tokens, about):
    given = SMALL[2:] if factor == "geometry" else SMALL
    fields = measured("sweep", *given, "--factor", factor, "--values", values)
    assert [row["prompt_tokens"] for row in fields["rows"]] == tokens
    assert [row["value"] for row in fields["rows"]] == values.split(",")
    assert fields["rows"][0]["full_ms"] != fields["rows"][1]["full_ms"]  # one for each prompt
    assert fields["about"][0] == about


def test_every_tier_reads_the_same_prompt():
    rows = printed("sweep-tier")["rows"]
    assert [row["value"] for row in rows] == ["memory", "disk"]
    assert {row["kv_bytes"] for row in rows} == {KV_BYTES}
    assert rows[0]["full_ms"] == rows[1]["full_ms"]
    assert rows[0]["reuse_ms"] != rows[1]["reuse_ms"]


def test_an_encoding_changes_what_is_stored_and_not_what_is_computed():
    native, small = measured("sweep", *SMALL, "--dtype", "bfloat16", "--factor", "encoding")["rows"]
    assert (native["value"], small["value"]) == ("native", "int8")
    assert native["kv_bytes"] == KV_BYTES
    assert small["kv_bytes"] < 0.8 * KV_BYTES
    assert native["floor_speedup"] == small["floor_speedup"]


def test_every_factor_has_default_values():
    base = SweepCase("", Workload(), ON_DISK, "tiny")
    assert all(len(make_cases(factor, None, base)) > 1 for factor in FACTORS)


def line(axes: Axes, label: str) -> Line2D:
    return next(found for found in axes.get_lines() if found.get_label() == label)


@pytest.mark.parametrize(
    ("factor", "values", "x", "label"),
    [("ratio", ["0.05", "0.15", "1.0"], [0.05, 0.15, 1], "ratio"),
     ("chunk-tokens", ["256", "512"], [256, 512], "chunk-tokens"),
     ("context", ["1024", "2048"], [101, 102], "tokens of the prompt"),
     ("tier", ["memory", "disk", "1GB/s"], [0, 1, 2], "tier")],
)  # fmt: skip
def test_a_sweep_is_drawn_at_its_values_joined_if_they_are_numbers(factor, values, x, label):
    times = {
        way: [Timing(at + i, at + i - 0.5, at + i + 2) for i in range(len(values))]
        for way, at in {"full prefill": 50, "reuse": 4, "blend": 9}.items()
    }
    rows = [
        SweepRow(value, 101 + i, 0.15, blend, full, reuse, 2.0, 3.0, 1)
        for i, (value, full, reuse, blend) in enumerate(zip(values, *times.values(), strict=True))
    ]
    (axes,) = sweep_figure(SweepResult("", factor, ("about", "it"), 3, tuple(rows))).axes
    assert (axes.get_title(), axes.get_xlabel()) == ("about\nit", label)
    assert axes.get_legend_handles_labels()[1] == list(times)
    for way, timings in times.items():
        drawn: Any = line(axes, way)
        assert list(drawn.get_xdata()) == x
        assert list(drawn.get_ydata()) == [timing.median for timing in timings]
        assert (drawn.get_linestyle() == "None") == (factor == "tier")
    if factor == "context":
        assert [text.get_text() for text in axes.get_xticklabels()] == ["101", "102"]
    if factor == "tier":
        assert [text.get_text() for text in axes.get_xticklabels()] == values
        paths: Any = [path.vertices for bars in axes.collections for path in bars.get_paths()]
        bars = {(path[0][1], path[1][1]) for path in paths}
        assert {(ms.low, ms.high) for timings in times.values() for ms in timings} <= bars
