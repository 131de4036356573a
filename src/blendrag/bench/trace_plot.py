"""A request's timeline as a picture: a lane for each kind of work, a box for each layer. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from blendrag.bench.trace import TraceResult
from blendrag.timeline import COMPUTE, LOAD, REPOSITION, SELECT, WAIT

LANES = (LOAD, WAIT, REPOSITION, SELECT, COMPUTE)
#: Okabe and Ito 2008, which colour-blind readers can tell apart; two shades, so that layers can be told.
COLOURS = {
    LOAD: ("#0072B2", "#56B4E9"),
    WAIT: ("#c0c0c0", "#dddddd"),
    REPOSITION: ("#CC79A7", "#e3b3cd"),
    SELECT: ("#E69F00", "#f3cd7a"),
    COMPUTE: ("#009E73", "#7fceb8"),
}
DPI = 144


def timeline(result: TraceResult) -> Figure:
    """Lanes over milliseconds; a scout pass is hatched."""
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    axes = figure.subplots()
    for span in result.spans:
        axes.broken_barh(
            [(1e3 * span.began_s, 1e3 * span.seconds)],
            (LANES.index(span.what) - 0.4, 0.8),
            facecolors=COLOURS[span.what][span.layer % 2],
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
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{result.model}, {result.prompt_tokens} tokens, {result.policy} at r = {result.ratio:g}, KV from "
        f"{result.tier}: overlap {result.overlap:.2f}",
        fontsize=9,
    )
    return figure


def write_plot(path: Path, result: TraceResult) -> None:
    """Draw into ``path``, a PNG."""
    timeline(result).savefig(path, dpi=DPI, metadata={"Software": None})
