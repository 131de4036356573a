"""Figures of sweep and load show the numbers of their rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from pydantic import TypeAdapter

from blendrag.lab.bench.load import LoadResult
from blendrag.lab.bench.rounds import Timing
from blendrag.lab.bench.sweep import SweepResult, SweepRow
from blendrag.lab.plots import load_figure, sweep_figure
from lab.bench.small import printed

WAYS = ("full prefill", "reuse", "blend")


def swept(factor: str, values: Sequence[str], tokens: Sequence[int] = (100,) * 9) -> SweepResult:
    """Different times for every value and way."""
    rows = []
    for number, value in enumerate(values):
        ms = 100.0 * (number + 1)
        rows.append(
            SweepRow(
                value=value, prompt_tokens=tokens[number], ratio=0.15,
                blend_ms=Timing(ms, ms - 10, ms + 20),
                full_ms=Timing(ms + 1001, ms + 991, ms + 1021),
                reuse_ms=Timing(ms / 10 + 2, ms / 10 + 1, ms / 10 + 4),
                speedup=2.0, floor_speedup=3.0, kv_bytes=1,
            )
        )  # fmt: skip
    return SweepResult(None, factor, ("about", "it"), 3, tuple(rows))


def way_timings(row: SweepRow) -> tuple[Timing, ...]:
    """In the order of :data:`WAYS`."""
    return row.full_ms, row.reuse_ms, row.blend_ms


def line(axes: Axes, label: str) -> Line2D:
    return next(found for found in axes.get_lines() if found.get_label() == label)


@pytest.mark.parametrize(
    ("factor", "values"),
    [("ratio", ("0.05", "0.15", "1.0")), ("chunk-tokens", ("256", "512"))],
)
def test_numeric_factors_are_drawn_at_their_values(factor: str, values: tuple[str, ...]) -> None:
    result = swept(factor, values)
    (axes,) = sweep_figure(result).axes
    times = [
        [timing.median for timing in each]
        for each in zip(*(way_timings(row) for row in result.rows), strict=True)
    ]
    assert axes.get_legend_handles_labels()[1] == list(WAYS)
    for label, expected in zip(WAYS, times, strict=True):
        drawn = line(axes, label)
        assert list(drawn.get_xdata()) == [float(value) for value in values]
        assert list(drawn.get_ydata()) == expected
        assert drawn.get_linestyle() != "None"
    assert axes.get_title() == "about\nit"
    assert axes.get_xlabel() == factor


def test_a_context_is_drawn_at_the_tokens_of_its_prompt() -> None:
    (axes,) = sweep_figure(swept("context", ("1024", "2048"), (544, 1568))).axes
    assert list(line(axes, "blend").get_xdata()) == [544, 1568]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["544", "1568"]
    assert axes.get_xlabel() == "tokens of the prompt"


def test_named_values_are_not_joined_and_show_their_spread() -> None:
    result = swept("tier", ("memory", "disk", "1GB/s"))
    (axes,) = sweep_figure(result).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["memory", "disk", "1GB/s"]
    for label in WAYS:
        assert list(line(axes, label).get_xdata()) == [0, 1, 2]
        assert line(axes, label).get_linestyle() == "None"
    drawn = {
        (path.vertices[0][1], path.vertices[1][1])
        for collection in axes.collections
        for path in collection.get_paths()
    }
    for row in result.rows:
        assert {(timing.low, timing.high) for timing in way_timings(row)} <= drawn


def test_load_is_drawn_by_rate_with_the_ttft_that_ways_are_compared_at() -> None:
    result = TypeAdapter(LoadResult).validate_python(printed("load"))
    (axes,) = load_figure(result).axes
    for way in ("full", "prefix", "blend"):
        rows = [row for row in result.rows if row.way == way]
        assert list(line(axes, way).get_xdata()) == [row.requests_per_s for row in rows]
        assert list(line(axes, way).get_ydata()) == [row.mean_ttft_ms for row in rows]
    level = line(axes, "twice full's\nwithout load")
    assert list(level.get_ydata()) == [result.doubled_ttft_ms] * 2
    tops = {max(path.vertices[:, 1]) for band in axes.collections for path in band.get_paths()}
    assert {max(row.p95_ttft_ms for row in result.rows if row.way == "blend")} <= tops
