"""The paper's figures: what is drawn is what the rows say, and it is drawn the same every time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blendrag.cli.plots import COLOURS, styles, write_png
from blendrag.lab.evaluation import plots
from lab.evaluation import invented_rows

ROWS = invented_rows.sweep()
REPORT = invented_rows.deviations()
FIGURES: dict[str, Callable[[], Figure]] = {
    "deviation": lambda: plots.deviation_against_ratio(REPORT),
    "distribution": lambda: plots.deviation_distribution(REPORT),
    "correlation": lambda: plots.layer_correlation(REPORT),
    "ttft": lambda: plots.quality_against_ttft(ROWS),
    "ratio": lambda: plots.quality_against_ratio(ROWS, ("all", *invented_rows.KINDS)),
    "cost": lambda: plots.quality_against_cost(ROWS),
    "chunks": lambda: plots.quality_against_chunks(invented_rows.chunks()),
}


def curve(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    """x and y of the line with that label."""
    found = next(line for line in axes.get_lines() if line.get_label() == label)
    return list(found.get_xdata()), list(found.get_ydata())


def labels(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def of(policy: str, kind: str = "all") -> list[dict[str, Any]]:
    return [row for row in ROWS if row["policy"] == policy and row["kind"] == kind]


@pytest.mark.parametrize("name", FIGURES)
def test_equal_rows_give_an_equal_png(tmp_path: Path, name: str) -> None:
    once, twice = tmp_path / "once.png", tmp_path / "twice.png"
    write_png(FIGURES[name](), once)
    write_png(FIGURES[name](), twice)
    assert once.read_bytes().startswith(b"\x89PNG")
    assert len(once.read_bytes()) > 5000
    assert once.read_bytes() == twice.read_bytes()


def test_deviation_is_drawn_over_the_ratio_by_policy_and_schedule() -> None:
    axes = plots.deviation_against_ratio(REPORT).axes[0]
    assert labels(axes) == ["hkvd, constant", "hkvd, geometric", "query, constant", "oracle"]
    points = [p for p in REPORT["points"] if (p["policy"], p["schedule"]) == ("hkvd", "geometric")]
    assert curve(axes, "hkvd, geometric") == (
        [p["ratio"] for p in points],
        [p["attention"] for p in points],
    )


def test_the_distribution_is_drawn_of_a_low_a_middle_and_a_high_layer() -> None:
    axes = plots.deviation_distribution(REPORT).axes[0]
    assert labels(axes) == ["layer 1", "layer 6", "layer 11"]
    deviation, share = curve(axes, "layer 11")
    assert deviation == REPORT["distribution"][-1]["quantiles"]
    assert (share[0], share[50], share[-1]) == (0.0, 0.5, 1.0)


def test_correlation_has_a_bar_for_each_pair_of_neighbours() -> None:
    axes = plots.layer_correlation(REPORT).axes[0]
    heights = [patch.get_height() for patch in axes.patches]
    assert heights == [pair["rho"] for pair in REPORT["correlation"]]
    assert [text.get_text() for text in axes.get_xticklabels()][:2] == ["1–2", "2–3"]


def test_quality_is_drawn_over_ttft_with_baselines_and_without_no_context() -> None:
    axes = plots.quality_against_ttft(ROWS).axes[0]
    assert set(labels(axes)) == {"full", "prefix", "reuse", "boundary(4)", "query", "hkvd"}
    rows = of("hkvd")
    assert curve(axes, "hkvd") == ([r["ttft_ms"] for r in rows], [r["pgr"] for r in rows])


def test_quality_is_drawn_over_the_ratio_with_its_interval_for_each_kind() -> None:
    figure = plots.quality_against_ratio(ROWS, ("all", "coreference"))
    everything, coreference = figure.axes
    assert (everything.get_title(), coreference.get_title()) == ("all", "coreference")
    assert set(labels(coreference)) == {"reuse", "boundary(4)", "query", "hkvd"}
    rows = of("query", "coreference")
    assert curve(coreference, "query") == ([r["ratio"] for r in rows], [r["pgr"] for r in rows])
    drawn = [segment for lines in coreference.collections for segment in ends(lines)]
    for row in rows:
        assert (row["pgr_low"], row["pgr_high"]) in drawn


@pytest.mark.parametrize("name", FIGURES)
def test_all_points_and_intervals_lie_within_the_axes(name: str) -> None:
    for axes in FIGURES[name]().axes:
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        for label in labels(axes):
            x, y = curve(axes, label)
            assert left <= min(x) <= max(x) <= right
            assert bottom <= min(y) <= max(y) <= top
        for segment in (s for lines in axes.collections for s in ends(lines)):
            assert bottom <= min(segment) <= max(segment) <= top + 1e-9


def ends(lines: Any) -> list[tuple[float, ...]]:
    """Lower and upper ends of intervals drawn as bars."""
    if not hasattr(lines, "get_segments"):
        return []
    return [tuple(segment[:, 1]) for segment in lines.get_segments()]


def test_few_lines_have_bands_that_reach_from_low_to_high() -> None:
    rows = [row for row in ROWS if row["policy"] == "query"]
    axes = plots.quality_against_ratio(rows).axes[0]
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert min(heights) == min(row["pgr_low"] for row in of("query"))
    assert max(heights) == max(row["pgr_high"] for row in of("query"))


def test_cost_charges_what_a_policy_computes_to_choose() -> None:
    axes = plots.quality_against_cost(ROWS).axes[0]
    assert curve(axes, "hkvd")[0] == [row["charged_ratio"] for row in of("hkvd")]


def test_rows_whose_pgr_is_undefined_are_left_out() -> None:
    rows = [invented_rows.row("query", ratio=0.02, pgr=None), invented_rows.row("query")]
    axes = plots.quality_against_ratio(rows).axes[0]
    assert curve(axes, "query") == ([0.05], [0.9])
    assert labels(plots.quality_against_ratio(rows[:1]).axes[0]) == []


def test_chunk_count_and_length_are_drawn_where_the_other_is_the_usual_one() -> None:
    figure = plots.quality_against_chunks(invented_rows.chunks())
    count, length, count_ms, length_ms = figure.axes
    assert curve(count, "query")[0] == [3, 6, 12]
    assert curve(length, "query")[0] == [64, 128, 512]
    assert curve(length_ms, "full")[1] == [0.3 * 6 * tokens for tokens in (64, 128, 512)]
    assert curve(count_ms, "hkvd")[1] == [22 + 0.08 * n * 64 for n in (3, 6, 12)]


def test_schedules_stand_side_by_side() -> None:
    names = ("constant", "linear", "geometric:0.5")
    rows = [
        invented_rows.row(policy, schedule=name, pgr=0.5 + 0.1 * i)
        for policy in ("query", "hkvd")
        for i, name in enumerate(names)
    ]
    axes = plots.quality_by_schedule([*rows, invented_rows.unsteered("full", "all", 1.0)]).axes[0]
    assert labels(axes) == ["query", "hkvd"]
    assert curve(axes, "hkvd") == ([0, 1, 2], [row["pgr"] for row in rows[:3]])
    assert [text.get_text() for text in axes.get_xticklabels()] == list(names)


def test_what_varies_within_a_policy_is_said_in_the_legend() -> None:
    rows = [invented_rows.row("query", encode_prefix=on) for on in (True, False)]
    axes = plots.quality_against_ratio(rows).axes[0]
    assert labels(axes) == ["query, behind the prefix", "query, behind nothing"]


def test_a_policy_looks_the_same_whatever_stands_beside_it_and_no_two_look_alike() -> None:
    names = (
        "blend", "blend(8)", "hkvd", "hkvd-once", "query", "boundary(4)",
        "boundary(16)", "random", "full", "reuse", "prefix", "none",
    )  # fmt: skip
    found = styles(names)
    assert len(set(found.values())) == len(names)
    assert found["hkvd"] == styles(["hkvd", "best"])["hkvd"]
    assert len(set(COLOURS)) == len(COLOURS)
