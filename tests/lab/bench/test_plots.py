"""Pictures of sweeps and of load: what is drawn is what the rows say; and ``--plot`` of every bench."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from blendrag.cli.plots import write_png
from blendrag.lab.bench.load import LoadResult, RateRow, WayResult
from blendrag.lab.bench.sweep import SweepResult, SweepRow
from blendrag.lab.plots import load_figure, sweep_figure
from cli.commands import invoke, said
from lab.bench.lab import SMALL, measured

LOADED = (
    "--geometry", "tiny", "--chunks", "2", "--chunk-tokens", "16", "--question-tokens", "4",
    "--requests", "3", "--warm-requests", "1", "--corpus-chunks", "5", "--store-chunks", "4",
)  # fmt: skip
WAYS = ("full prefill", "reuse", "blend")


def row(factor: str, value: str, number: int, tokens: int = 100) -> SweepRow:
    """Times that tell every value and way apart: blend's end in 0, full's in 1, reuse's in 2."""
    ms = 100.0 * (number + 1)
    return SweepRow(
        factor=factor, value=value, prompt_tokens=tokens, ratio=0.15, charged_ratio=0.15,
        ms=ms, spread_ms=(ms - 10, ms + 20),
        full_ms=ms + 1001, full_spread_ms=(ms + 991, ms + 1021),
        reuse_ms=ms / 10 + 2, reuse_spread_ms=(ms / 10 + 1, ms / 10 + 4),
        speedup=2.0, reuse_speedup=9.0, floor_speedup=3.0, kv_bytes=1,
    )  # fmt: skip


def swept(factor: str, values: Sequence[str]) -> SweepResult:
    rows = tuple(row(factor, value, number) for number, value in enumerate(values))
    return SweepResult(factor, ("about", "it"), 3, rows)


def line(axes: Axes, label: str) -> Line2D:
    return next(found for found in axes.get_lines() if found.get_label() == label)


def loaded() -> LoadResult:
    rates = (0.5, 1.0, 2.0)
    rows = [
        RateRow(way, rate, rate, 10.0 * rate + i, 30.0 * rate + i, rate)
        for rate in rates
        for i, way in enumerate(("full", "prefix", "blend"))
    ]
    ways = tuple(WayResult(way, 1.0, 1.0, 0.0, 1.0) for way in ("full", "prefix", "blend"))
    return LoadResult(
        "tiny", "disk", "native", "query", 0.15, 1, 1.0, 25.0, 3.0, 1.2, ways, tuple(rows), 60
    )


# -- what is drawn --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "values"),
    [("ratio", ("0.05", "0.15", "1.0")), ("chunk-tokens", ("256", "512")), ("chunks", ("2", "4"))],
)
def test_factors_that_are_numbers_are_drawn_at_their_values(
    factor: str, values: tuple[str, ...]
) -> None:
    result = swept(factor, values)
    rows = result.rows
    (axes,) = sweep_figure(result).axes
    expected = {
        "full prefill": [r.full_ms for r in rows],
        "reuse": [r.reuse_ms for r in rows],
        "blend": [r.ms for r in rows],
    }
    assert axes.get_legend_handles_labels()[1] == list(WAYS)
    for label, times in expected.items():
        drawn = line(axes, label)
        assert list(drawn.get_xdata()) == [float(value) for value in values]
        assert list(drawn.get_ydata()) == times
        assert drawn.get_linestyle() != "None"
    assert axes.get_title() == "about\nit"
    assert axes.get_xlabel() == factor


def test_a_context_is_drawn_at_the_tokens_of_its_prompt() -> None:
    rows = (row("context", "1024", 0, 544), row("context", "2048", 1, 1568))
    (axes,) = sweep_figure(SweepResult("context", ("about", "it"), 3, rows)).axes
    for label in WAYS:
        assert list(line(axes, label).get_xdata()) == [544, 1568]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["544", "1568"]
    assert axes.get_xlabel() == "tokens of the prompt"


def test_factors_that_are_names_stand_side_by_side_and_are_not_joined() -> None:
    (axes,) = sweep_figure(swept("tier", ("memory", "disk", "1GB/s"))).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["memory", "disk", "1GB/s"]
    for label in WAYS:
        assert list(line(axes, label).get_xdata()) == [0, 1, 2]
        assert line(axes, label).get_linestyle() == "None"


def test_the_spread_of_every_way_is_drawn_from_the_lowest_to_the_highest() -> None:
    result = swept("tier", ("memory", "disk"))
    (axes,) = sweep_figure(result).axes
    drawn = {
        (path.vertices[0][1], path.vertices[1][1])
        for collection in axes.collections
        for path in collection.get_paths()
    }
    for each in result.rows:
        assert {each.spread_ms, each.full_spread_ms, each.reuse_spread_ms} <= drawn


def test_load_is_drawn_by_rate_with_the_ttft_that_ways_are_compared_at() -> None:
    result = loaded()
    (axes,) = load_figure(result).axes
    for way in ("full", "prefix", "blend"):
        rows = [row for row in result.rows if row.way == way]
        assert list(line(axes, way).get_xdata()) == [row.requests_per_s for row in rows]
        assert list(line(axes, way).get_ydata()) == [row.mean_ttft_ms for row in rows]
    assert list(line(axes, "twice full's\nwithout load").get_ydata()) == [25.0, 25.0]
    tops = {max(path.vertices[:, 1]) for band in axes.collections for path in band.get_paths()}
    assert {max(row.p95_ttft_ms for row in result.rows if row.way == "blend")} <= tops


def test_equal_rows_give_equal_files(tmp_path: Path) -> None:
    result = swept("chunks", ("2", "4", "8"))
    once, twice = tmp_path / "once.png", tmp_path / "twice.png"
    write_png(sweep_figure(result), once)
    write_png(sweep_figure(result), twice)
    assert once.read_bytes() == twice.read_bytes()
    assert len(once.read_bytes()) > 5000


@pytest.mark.parametrize(
    ("factor", "values", "about"),
    [("ratio", "0.1,0.5", "tiny, 2 × 32 + 8 tokens, query at r = …, native KV from disk"),
     ("chunks", "1,2", "tiny, … × 32 + 8 tokens, query at r = 0.15, native KV from disk"),
     ("tier", "memory,disk", "tiny, 2 × 32 + 8 tokens, query at r = 0.15, native KV from …")],
)  # fmt: skip
def test_a_sweep_says_what_was_as_it_is_for_all_values(
    factor: str, values: str, about: str
) -> None:
    result = invoke("bench", "sweep", *SMALL, "--factor", factor, "--values", values)
    assert result.exit_code == 0, result.stderr
    assert about in " ".join(result.stdout.split())


# -- the commands -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [("sweep", *SMALL, "--factor", "chunks", "--values", "1,2"),
     ("sweep", *SMALL, "--factor", "tier", "--values", "memory,disk"), ("load", *LOADED),
     ("trace", *SMALL)],
)  # fmt: skip
def test_a_plot_is_a_png_beside_what_is_printed(tmp_path: Path, command: tuple[str, ...]) -> None:
    picture = tmp_path / "picture.png"
    fields = measured(*command, "--plot", str(picture))
    assert fields
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["sweep", "load", "trace"])
@pytest.mark.parametrize("path", ["picture.jpg", "no/such/place/p.png", "."])
def test_a_picture_that_could_not_be_written_is_refused_before_anything_is_measured(
    command: str, path: str
) -> None:
    result = invoke("bench", command, "--geometry", "none such", "--plot", path)
    assert result.exit_code == 2
    assert said(result).startswith(f"error: --plot {path} cannot be written")


@pytest.mark.parametrize("command", ["sweep", "load", "trace"])
def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("bench", command, "--geometry", "none such", "--plot", str(tmp_path / "p.png"))
    assert result.exit_code == 2
    assert "blendrag[plots]" in said(result)
