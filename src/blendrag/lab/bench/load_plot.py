"""Load as a picture: TTFT by request rate, of every way. Needs matplotlib."""

from __future__ import annotations

from matplotlib.figure import Figure

from blendrag.cli import figures
from blendrag.cli.figures import Line, log_scale
from blendrag.lab.bench.load import LoadResult

LOOKS = {**figures.BASELINES, **figures.looks(["blend"])}


def by_rate(result: LoadResult) -> Figure:
    """Mean TTFT, with the 95th percentile above it; and the TTFT at which the ways are compared."""
    figure, (axes,) = figures.panels(1)
    figures.draw(axes, [_line(result, way.way) for way in result.ways])
    axes.axhline(
        result.doubled_ttft_ms,
        color=figures.GREY,
        linestyle=":",
        label="twice full's\nwithout load",
    )
    axes.set(xlabel="requests per second", ylabel="mean milliseconds to the first token")
    log_scale(axes, "x")
    log_scale(axes)
    figures.title(
        axes,
        f"{result.model}, {result.requests} requests\n{result.policy} at r = {result.ratio:g}, "
        f"{result.encoding} KV from {result.tier}",
    )
    figures.legend(figure, [axes])
    return figure


def _line(result: LoadResult, way: str) -> Line:
    rows = [row for row in result.rows if row.way == way]
    mean = [row.mean_ttft_ms for row in rows]
    p95 = [row.p95_ttft_ms for row in rows]
    return Line(way, LOOKS[way], [row.requests_per_s for row in rows], mean, mean, p95)
