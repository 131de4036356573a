"""The lab's figures: results of benches, and of the arena. Needs matplotlib.

:mod:`blendrag.cli.plots` has the style and the drawing of lines.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from blendrag.cli.plots import (
    BASELINES,
    COLOURS,
    GREY,
    PANEL_HEIGHT,
    Line,
    draw,
    legend,
    log_scale,
    panels,
    styles,
    title,
)
from blendrag.metrics import COMPUTE, LOAD, REPOSITION, SELECT, WAIT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from blendrag.lab.bench.load import LoadResult
    from blendrag.lab.bench.sweep import SweepResult
    from blendrag.lab.bench.trace import TraceResult

# -- benches --------------------------------------------------------------------------------------

#: Factors of a sweep whose values are numbers, and those of them whose values double.
NUMBERS = ("ratio", "chunks", "chunk-tokens", "context")
DOUBLING = ("chunk-tokens", "context")
LANES = (LOAD, WAIT, REPOSITION, SELECT, COMPUTE)
BLUE, _, GREEN, PINK, ORANGE, SKY, _ = COLOURS
#: Two shades for each lane, because neighbouring layers must look different.
SHADES = {
    LOAD: (BLUE, SKY),
    WAIT: ("#c0c0c0", "#dddddd"),
    REPOSITION: (PINK, "#e3b3cd"),
    SELECT: (ORANGE, "#f3cd7a"),
    COMPUTE: (GREEN, "#7fceb8"),
}


def sweep_figure(result: SweepResult) -> Figure:
    """Median TTFT of full prefill, reuse and blend by the factor's value, with the lowest and highest."""
    figure, (axes,) = panels(1)
    factor, rows = result.factor, result.rows
    by_tokens = factor == "context"  # its values are limits
    values = [str(row.prompt_tokens) if by_tokens else row.value for row in rows]
    joined = factor in NUMBERS
    x = [float(value) if joined else i for i, value in enumerate(values)]
    found = (
        ("full prefill", BASELINES["full"], [(row.full_ms, row.full_spread_ms) for row in rows]),
        ("reuse", BASELINES["reuse"], [(row.reuse_ms, row.reuse_spread_ms) for row in rows]),
        ("blend", styles(["blend"])["blend"], [(row.ms, row.spread_ms) for row in rows]),
    )
    lines = [
        Line(
            label,
            style if joined else replace(style, dash="none"),
            x,
            [ms for ms, _ in times],
            [low for _, (low, _) in times],
            [high for _, (_, high) in times],
        )
        for label, style, times in found
    ]
    draw(axes, lines)
    if factor in DOUBLING:
        axes.set_xscale("log", base=2)
    if factor != "ratio":  # its values may be too many and too close for a tick each
        axes.set_xticks(x, values)
        axes.set_xticks([], minor=True)
    axes.set(
        xlabel="tokens of the prompt" if by_tokens else factor,
        ylabel="milliseconds to the first token",
    )
    log_scale(axes)
    title(axes, "\n".join(result.about))
    legend(figure, [axes])
    return figure


def load_figure(result: LoadResult) -> Figure:
    """Mean TTFT by request rate with its 95th percentile, and the TTFT at which the ways are compared."""
    figure, (axes,) = panels(1)
    known = {**BASELINES, **styles(["blend"])}
    lines = []
    for way in (each.way for each in result.ways):
        rows = [row for row in result.rows if row.way == way]
        mean, p95 = [row.mean_ttft_ms for row in rows], [row.p95_ttft_ms for row in rows]
        lines.append(Line(way, known[way], [row.requests_per_s for row in rows], mean, mean, p95))
    draw(axes, lines)
    axes.axhline(
        result.doubled_ttft_ms, color=GREY, linestyle=":", label="twice full's\nwithout load"
    )
    axes.set(xlabel="requests per second", ylabel="mean milliseconds to the first token")
    log_scale(axes, "x")
    log_scale(axes)
    title(
        axes,
        f"{result.model}, {result.requests} requests\n{result.policy} at r = {result.ratio:g}, "
        f"{result.encoding} KV from {result.tier}",
    )
    legend(figure, [axes])
    return figure


def trace_figure(result: TraceResult) -> Figure:
    """A lane for each kind of work over milliseconds, a box for each layer; a scout pass is hatched."""
    figure, (axes,) = panels(1, legend=False)
    figure.set_size_inches(10.0, PANEL_HEIGHT)
    for span in result.spans:
        axes.broken_barh(
            [(1e3 * span.began_s, 1e3 * span.seconds)],
            (LANES.index(span.what) - 0.4, 0.8),
            facecolors=SHADES[span.what][span.layer % 2],
            hatch="////" if span.pass_name else None,
            edgecolor="white" if span.pass_name else "none",
            linewidth=0,
        )
    axes.set_yticks(range(len(LANES)), LANES)
    axes.invert_yaxis()
    axes.set_xlabel(
        "milliseconds of one request; shades alternate by layer, the scout pass is hatched"
    )
    axes.set_xlim(0, None)
    title(
        axes,
        f"{result.model}, {result.prompt_tokens} tokens, {result.policy} at r = {result.ratio:g}, KV from "
        f"{result.tier}: overlap {result.overlap:.2f}",
    )
    return figure
