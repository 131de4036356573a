"""A request's timeline as a picture: a lane for each kind of work, a box for each layer. Needs matplotlib."""

from __future__ import annotations

from matplotlib.figure import Figure

from blendrag.cli.figures import COLOURS, PANEL_HEIGHT, panels, title
from blendrag.lab.bench.trace import TraceResult
from blendrag.metrics import COMPUTE, LOAD, REPOSITION, SELECT, WAIT

#: Of the picture, in inches.
WIDTH = 10.0
LANES = (LOAD, WAIT, REPOSITION, SELECT, COMPUTE)
BLUE, _, GREEN, PINK, ORANGE, SKY, _ = COLOURS
#: Two shades of each, so that layers can be told apart.
SHADES = {
    LOAD: (BLUE, SKY),
    WAIT: ("#c0c0c0", "#dddddd"),
    REPOSITION: (PINK, "#e3b3cd"),
    SELECT: (ORANGE, "#f3cd7a"),
    COMPUTE: (GREEN, "#7fceb8"),
}


def timeline(result: TraceResult) -> Figure:
    """Lanes over milliseconds; a scout pass is hatched."""
    figure, (axes,) = panels(1, legend=False)
    figure.set_size_inches(WIDTH, PANEL_HEIGHT)
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
