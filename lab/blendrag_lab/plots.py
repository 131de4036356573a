"""Plots: the style of every figure of the lab, and the drawing of lines.

Equal numbers give equal files: no dates, no versions, the fonts that come with matplotlib, which is imported
only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 144
#: Size of one panel, in inches.
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
}
#: Okabe and Ito (2008), for colour-blind readers. Indigo (Tol) replaces their yellow, which vanishes on
#: white; black is full prefill's.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288")
#: Markers with arms are larger and have no white edge, which would hide the arms.
MARKER_SIZES = {"*": 9.0, "X": 6.5, "P": 6.5}
GREY = "#7a7a7a"
#: Panels with more lines show intervals as bars, because overlapping bands hide each other.
BANDS = 3
#: Distance between lines that are drawn side by side.
SPREAD_POINTS = 1.6


@dataclass(frozen=True)
class LineStyle:
    colour: str
    marker: str
    dash: str = "-"
    filled: bool = True


FULL_PREFILL = LineStyle("#000000", "*")


@dataclass(frozen=True)
class Series:
    """A series: points in the order of ``x``, each with its interval if there is one."""

    label: str
    style: LineStyle
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


def panels(
    columns: int, rows: int = 1, legend: bool = True, share_y: Literal["all", "none"] = "none"
) -> tuple[Figure, list[Axes]]:
    """A figure of ``rows`` × ``columns`` panels, row by row, with room for a legend on the right."""
    import matplotlib
    from matplotlib.figure import Figure

    size = (columns * PANEL_WIDTH + (1.7 if legend else 0.0), rows * PANEL_HEIGHT)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, sharey=share_y, squeeze=False)
    return figure, list(axes.flat)


def draw(axes: Axes, lines: Sequence[Series], spread: bool = False) -> None:
    """Draw lines with markers and intervals: bands for a few joined lines, otherwise bars.

    ``spread`` draws lines with equal x side by side, without changing their data.
    """
    from matplotlib.transforms import ScaledTranslation

    for number, line in enumerate(lines):
        joined = len(line.x) > 1 and line.style.dash != "none"
        (plotted,) = axes.plot(
            line.x, line.y, label=line.label, color=line.style.colour,
            linestyle=line.style.dash if joined else "none", **_marker(line.style),
        )  # fmt: skip
        drawn: list[Artist] = [plotted]
        if any(bound is not None for bound in line.low):
            drawn.append(_interval(axes, line, joined and not spread and len(lines) <= BANDS))
        if spread:  # afterwards, because the axes' limits come from the data
            assert axes.figure is not None
            points = SPREAD_POINTS * (number - (len(lines) - 1) / 2)
            shift = ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)
            for artist in drawn:
                artist.set_transform(axes.transData + shift)


def _marker(style: LineStyle) -> dict[str, Any]:
    size = MARKER_SIZES.get(style.marker, STYLE["lines.markersize"])
    made = {"marker": style.marker, "markersize": size}
    if not style.filled:
        return {**made, "markerfacecolor": "#ffffff", "markeredgewidth": 1.2}
    edge = 0.0 if style.marker in MARKER_SIZES else 0.3
    return {**made, "markeredgecolor": "#ffffff", "markeredgewidth": edge}


def _interval(axes: Axes, line: Series, band: bool) -> Artist:
    low = [y if b is None else b for b, y in zip(line.low, line.y, strict=True)]
    high = [y if b is None else b for b, y in zip(line.high, line.y, strict=True)]
    colour = line.style.colour
    if band:
        return axes.fill_between(line.x, low, high, color=colour, alpha=0.13, linewidth=0)
    # errorbar requires the value inside its interval; rounding may put it outside.
    return axes.vlines(line.x, low, high, color=colour, linewidth=1.0, alpha=0.6)


def title(axes: Axes, text: str) -> None:
    """Set the title of a panel in the size of the other text."""
    axes.set_title(text, fontsize=STYLE["axes.titlesize"])


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for all panels, to their right, with each label once."""
    import matplotlib

    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        with matplotlib.rc_context(STYLE):
            figure.legend(list(handles.values()), list(handles), loc="outside right center")


def write_png(figure: Figure, path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=DPI, metadata={"Software": None})
