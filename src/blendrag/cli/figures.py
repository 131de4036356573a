"""How every figure looks and how it is written: palette, markers, lines with intervals, files.

Owns the style, and that equal numbers give equal files: no dates, no versions, salted ids in SVG, the
fonts that come with matplotlib. Colours are Okabe and Ito's, which colour-blind readers can tell
apart; markers say the same once more. Does not know what is plotted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, StrMethodFormatter
from matplotlib.transforms import ScaledTranslation, Transform

#: Dots per inch of the PNG.
DPI = 144
#: Width of a panel and height of a row of panels, in inches.
PANEL_WIDTH, PANEL_HEIGHT = 3.6, 2.9
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.5,
    "lines.markersize": 5.5,
    "svg.hashsalt": "blendrag",
}
#: Okabe and Ito 2008; their yellow vanishes on white and their black is full prefill's, so an indigo
#: of Tol's stands in.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
#: Of markers with arms: larger than the others, and without the edge that would eat them.
SIZES = {"*": 9.0, "X": 6.5, "P": 6.5}
DASHES = ("-", "--", ":", "-.")
GREY = "#7a7a7a"
#: More lines than these in a panel have bars for intervals: bands on top of one another hide all.
BANDS = 3
#: Between lines that are set apart.
SPREAD_POINTS = 1.6
#: Looks that stay with a name in all figures; other names take what is left, in order.
KNOWN = ("blend", "hkvd", "query", "query+hkvd", "hkvd-once", "boundary", "random")


@dataclass(frozen=True)
class Look:
    """How one series is drawn."""

    colour: str
    marker: str
    dash: str = "-"
    filled: bool = True


#: The ends and baselines that every policy is held against.
BASELINES = {
    "full": Look("#000000", "*"),
    "oracle": Look("#000000", "*", "--"),
    "prefix": Look(GREY, "D"),
    "reuse": Look(GREY, "X"),
    "none": Look(GREY, "v"),
    "map-reduce": Look("#56B4E9", "<"),
    "map-rerank": Look("#E69F00", ">"),
}


@dataclass(frozen=True)
class Line:
    """A series: points in the order of ``x``, with the interval of each where there is one."""

    label: str
    look: Look
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


def looks(policies: Iterable[str]) -> dict[str, Look]:
    """A look for each policy, by the name without ``(k)``; those of :data:`KNOWN` always alike.

    More policies than colours share them in other dashes.
    """
    wanted = list(dict.fromkeys(policies))
    bare = {policy: policy.partition("(")[0] for policy in wanted}
    named = dict.fromkeys(name for name in bare.values() if name not in BASELINES)
    others = [name for name in named if name not in KNOWN]
    free = [i for i, name in enumerate(KNOWN) if name not in named]
    free += [len(COLOURS) + i for i in range(len(others))]
    index = dict(zip(KNOWN, range(len(KNOWN)), strict=True)) | dict(zip(others, free, strict=False))
    taken: dict[str, int] = {}
    found: dict[str, Look] = {}
    for policy, name in bare.items():
        look = BASELINES.get(name) or _look(index[name])
        number = taken[name] = taken.get(name, -1) + 1  # boundary(4) beside boundary(16)
        found[policy] = Look(look.colour, look.marker, DASHES[number % 4]) if number else look
    return found


def _look(index: int) -> Look:
    at = index % len(COLOURS)
    return Look(COLOURS[at], MARKERS[at], DASHES[index // len(COLOURS) % len(DASHES)])


def panels(
    columns: int, rows: int = 1, legend: bool = True, share_y: Literal["all", "none"] = "none"
) -> tuple[Figure, list[Axes]]:
    """A figure of ``rows`` × ``columns`` panels, row by row, with room for a legend on the right."""
    size = (columns * PANEL_WIDTH + (1.7 if legend else 0.0), rows * PANEL_HEIGHT)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, sharey=share_y, squeeze=False)
    return figure, list(axes.flat)


def draw(axes: Axes, lines: Sequence[Line], spread: bool = False) -> None:
    """The lines with their markers; intervals as bands where a few lines have several points, else as
    bars. ``spread`` sets lines a little apart where many have the same x; their data stays."""
    for number, line in enumerate(lines):
        look = line.look
        joined = len(line.x) > 1 and look.dash != "none"
        (plotted,) = axes.plot(
            line.x, line.y, label=line.label, color=look.colour,
            linestyle=look.dash if joined else "none", **_marker(look),
        )  # fmt: skip
        drawn: list[Artist] = [plotted]
        if any(bound is not None for bound in line.low):
            drawn.append(_interval(axes, line, joined and not spread and len(lines) <= BANDS))
        if spread:  # afterwards, as the axes' limits are those of the data
            apart = SPREAD_POINTS * (number - (len(lines) - 1) / 2)
            for artist in drawn:
                artist.set_transform(axes.transData + _to_the_right(axes, apart))


def _marker(look: Look) -> dict[str, Any]:
    """White edges keep filled markers apart, but for those with arms, which they would eat."""
    size = SIZES.get(look.marker, STYLE["lines.markersize"])
    made = {"marker": look.marker, "markersize": size}
    if not look.filled:
        return {**made, "markerfacecolor": "#ffffff", "markeredgewidth": 1.2}
    edge = 0.0 if look.marker in SIZES else 0.3
    return {**made, "markeredgecolor": "#ffffff", "markeredgewidth": edge}


def _interval(axes: Axes, line: Line, band: bool) -> Artist:
    low = [y if b is None else b for b, y in zip(line.low, line.y, strict=True)]
    high = [y if b is None else b for b, y in zip(line.high, line.y, strict=True)]
    colour = line.look.colour
    if band:
        return axes.fill_between(line.x, low, high, color=colour, alpha=0.13, linewidth=0)
    # Not errorbar, which wants the value inside its interval: rounding may put it outside.
    return axes.vlines(line.x, low, high, color=colour, linewidth=1.0, alpha=0.6)


def _to_the_right(axes: Axes, points: float) -> Transform:
    assert axes.figure is not None
    return ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)


def title(axes: Axes, text: str) -> None:
    """Above the panel, no larger than the rest."""
    axes.set_title(text, fontsize=STYLE["axes.titlesize"])


def from_zero(axes: Axes) -> None:
    """The x axis begins at 0, with room for the marker of a point that stands there."""
    axes.set_xlim(-0.06 * axes.get_xlim()[1], None)


class WrittenOut(LogFormatter):
    """Labels where a logarithmic scale has room for them: 0.6, not a power of ten."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:,g}" if super().__call__(x, pos) else ""


def log_scale(axes: Axes, of: Literal["x", "y"] = "y") -> None:
    """A logarithmic scale whose ticks are written out as numbers."""
    axis = axes.yaxis if of == "y" else axes.xaxis
    axes.set(**{f"{of}scale": "log"})
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(WrittenOut(minor_thresholds=(1.5, 0.5)))


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for all panels, to their right; every label once."""
    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        with matplotlib.rc_context(STYLE):
            figure.legend(list(handles.values()), list(handles), loc="outside right center")


def write_png(figure: Figure, path: Path) -> None:
    """``figure`` alone, for a command's ``--plot``."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=DPI, metadata={"Software": None})


def save(figure: Figure, directory: Path, name: str) -> tuple[Path, Path]:
    """``name.png`` and ``name.svg`` in ``directory``, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    png, svg = directory / f"{name}.png", directory / f"{name}.svg"
    write_png(figure, png)
    with matplotlib.rc_context(STYLE):
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return png, svg
