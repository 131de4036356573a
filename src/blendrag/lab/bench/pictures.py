"""Which benches' results are drawn, and into which files: ``--plot``, and the performance page.

matplotlib is imported when a picture is drawn, not before.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blendrag.lab.bench.load import LoadResult
from blendrag.lab.bench.sweep import SweepResult
from blendrag.lab.bench.trace import TraceResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure_of(result: object) -> Figure | None:
    """The picture of a result; ``None`` of one that has none."""
    match result:
        case SweepResult():
            from blendrag.lab.bench.sweep_plot import by_value

            return by_value(result)
        case LoadResult():
            from blendrag.lab.bench.load_plot import by_rate

            return by_rate(result)
        case TraceResult():
            from blendrag.lab.bench.trace_plot import timeline

            return timeline(result)
    return None


def write_picture(path: Path, result: object) -> None:
    """Draw ``result``, which has a picture, into ``path``, a PNG."""
    from blendrag.cli.figures import write_png

    figure = figure_of(result)
    assert figure is not None
    write_png(figure, path)
