"""Result tables: the same rows on a terminal (rich) and on a page (Markdown)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

#: A cell without a value.
NOTHING = "–"

Column = tuple[str, Callable[[Any], str]]
"""Heading, and how a row's cell is written."""


@dataclass(frozen=True)
class ResultTable:
    """Cells as text, with the conditions of the measurement above them and notes below."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()
    after: Sequence[ResultTable] = ()
    """Further tables of the same result."""

    def markdown(self) -> str:
        """Title, table and notes in GitHub's Markdown."""
        lines = [[cell.replace("|", "\\|") for cell in row] for row in (self.head, *self.rows)]
        lines.insert(1, ["---"] * len(self.head))
        grid = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        others = [other.markdown() for other in self.after]
        return "\n\n".join(part for part in (self.title, grid, *self.notes, *others) if part)

    def print(self) -> None:
        from rich.table import Table

        from blendrag.cli.output import console

        printed = console(width=190)
        drawn = Table(*self.head, title=self.title or None)
        for row in self.rows:
            drawn.add_row(*row)
        printed.print(drawn)
        for note in self.notes:
            printed.print(note)
        for other in self.after:
            other.print()


def table(
    columns: Sequence[Column],
    rows: Iterable[Any],
    title: str = "",
    notes: Sequence[str] = (),
    after: Sequence[ResultTable] = (),
) -> ResultTable:
    """A line for each of ``rows``, written by ``columns``."""
    cells = [[write(row) for _, write in columns] for row in rows]
    return ResultTable([name for name, _ in columns], cells, title, notes, after)


def figure(value: float) -> str:
    """Three digits, or all digits before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def number(value: float | None, form: str) -> str:
    """``value`` in the format ``form``; a dash for ``None``."""
    return NOTHING if value is None else format(value, form)


def times(ratio: float) -> str:
    """``4.96×``."""
    return f"{ratio:.2f}×"


def spread(value: float, bounds: tuple[float, float]) -> str:
    """``10.8 (10.7 to 11.2)``: the median, and the lowest and highest value."""
    return f"{figure(value)} ({figure(bounds[0])} to {figure(bounds[1])})"


def interval(value: float | None, low: float | None, high: float | None) -> str:
    """``0.93 [0.88, 0.97]``; without bounds the value alone."""
    if value is None:
        return NOTHING
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"
