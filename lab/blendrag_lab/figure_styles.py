"""How policies and baselines look in all figures of the lab, and logarithmic axes with plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from blendrag_lab.plots import COLOURS, FULL_PREFILL, GREY, LineStyle

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")
#: These policies look the same in all figures.
KNOWN = (
    "blend",
    "hkvd",
    "query",
    "query+hkvd",
    "hkvd-once",
    "boundary",
    "random",
    "cacheblend",
    "query+shift",
    "query+writer",
    "query+shift+writer",
    "query+shift+after2",
    "query+shift+writer+after2",
)
BASELINES = {
    "full": FULL_PREFILL,
    "oracle": LineStyle("#000000", "*", "--"),
    "prefix": LineStyle(GREY, "D"),
    "reuse": LineStyle(GREY, "X"),
}


def styles(policies: Iterable[str]) -> dict[str, LineStyle]:
    """A style for each policy; the name without ``(k)`` decides on the colour and the marker.

    More policies than colours, and the same policy with another k, differ in their dashes.
    """
    names, used = list(KNOWN), Counter[str]()
    found: dict[str, LineStyle] = {}
    for policy in dict.fromkeys(policies):
        name = policy.partition("(")[0]
        if name in BASELINES:
            style = BASELINES[name]
        else:
            names += [name] * (name not in names)
            dash, at = divmod(names.index(name), len(COLOURS))
            style = LineStyle(COLOURS[at], MARKERS[at], DASHES[dash % len(DASHES)])
        if used[name]:
            style = replace(style, dash=DASHES[used[name] % len(DASHES)])
        used[name] += 1
        found[policy] = style
    return found


def log_scale(axes: Axes, of: Literal["x", "y"] = "y") -> None:
    """A logarithmic scale whose ticks are plain numbers: 0.6, not a power of ten."""
    from matplotlib.ticker import LogFormatter, StrMethodFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:,g}" if super().__call__(x, pos) else ""

    axis = axes.yaxis if of == "y" else axes.xaxis
    axes.set(**{f"{of}scale": "log"})
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(Plain(minor_thresholds=(1.5, 0.5)))
