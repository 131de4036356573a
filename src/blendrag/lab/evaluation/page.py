"""The pieces a page of results is made of: heads with commands, pictures, folded tables.

Owns where pictures lie and that they need matplotlib, which is imported when the first is drawn. Does
not know what a page says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from blendrag.errors import InvalidInputError
from blendrag.lab.evaluation.runs import Result, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Folder beside the page for pictures and numbers.
FOLDER = "quality"

Draw = Callable[[Any], "Figure"]
"""Rows, or a report on deviations, → a figure."""


def head(run: Run, result: Result) -> str:
    """Title, the commands that made the numbers, and what they ask."""
    commands = "\n".join(f"$ {command}" for command in result.commands)
    return f"## {run.title}\n\n```console\n{commands}\n```\n\n{run.text}"


def picture(folder: Path, name: str, text: str, draw: Draw, data: object) -> str:
    """Draw it into ``folder``, and the lines that show it."""
    from blendrag.cli.plots import write_png

    folder.mkdir(parents=True, exist_ok=True)
    write_png(draw(data), folder / f"{name}.png")
    return f"![{text}]({FOLDER}/{name}.png)\n\n*{text}*"


def folded(summary: str, text: str) -> str:
    """Shown when its summary is clicked."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def plots_module() -> ModuleType:
    """:mod:`blendrag.lab.evaluation.plots`; raises :class:`InvalidInputError` without matplotlib."""
    try:
        from blendrag.lab.evaluation import plots
    except ImportError as exc:
        raise InvalidInputError(
            'figures need the package matplotlib; pip install "blendrag[plots]"'
        ) from exc
    return plots
