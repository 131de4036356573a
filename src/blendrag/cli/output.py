"""Everything that is printed: JSON and results on stdout, everything else on stderr.

Texts of others are printed, too: documents, names of files, answers. Their control characters are shown as
escapes (:mod:`blendrag.wording`), never sent, so that nothing changes the terminal or forges a line. The
exception is the text of an answer on a stdout that is no terminal: a program gets it as the model wrote it.
Nothing else writes to a stream, which a rule of the linter holds (``banned-api`` in ``pyproject.toml``).
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from blendrag.text.names import short_name
from blendrag.wording import printable, printable_json, printable_line


def say(kind: str, text: str) -> None:
    """One line on stderr: ``error: …``, ``note: …``."""
    echo(f"{kind}: {' '.join(str(text).split())}", err=True)


def echo(*lines: str, err: bool = False) -> None:
    """Print each of ``lines`` as one line, whatever it holds; without any, an empty line."""
    typer.echo("\n".join(map(printable_line, lines)), err=err)


def write_piece(text: str) -> None:
    """Print a piece of an answer at once: shown on a terminal, otherwise as it is."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_thought(text: str) -> None:
    """Print a piece of reasoning at once, dim, on the terminal; a program gets the answer alone."""
    err = not sys.stdout.isatty()
    if not err or sys.stderr.isatty():
        screen = console(err=err)
        screen.print(Text(text), style="dim", end="", soft_wrap=True)
        screen.file.flush()


def confirmed(question: str) -> bool:
    """Ask on stderr for yes or no. Raises :class:`typer.Abort` without an answer."""
    return typer.confirm(printable_line(question), err=True)


def show(as_json: bool, report: Any, text: str) -> None:
    """Print a report, which is a dataclass, as JSON or as ``text``."""
    print_json(asdict(report)) if as_json else echo(text)


def print_json(
    fields: Mapping[str, Any] | Sequence[Mapping[str, Any]], indent: int | None = None
) -> None:
    """An object or a list, on one line without ``indent``; NaN and infinity become null."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "")
    text = json.dumps(
        _finite(fields), ensure_ascii=encoding != "utf8", allow_nan=False, indent=indent
    )
    typer.echo(printable_json(text))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


# -- tables and progress --------------------------------------------------------------------------


class _Console(Console):
    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text), **how)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:  # of rich itself
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def console(err: bool = False, width: int | None = None) -> Console:
    """rich's console on stdout or stderr; no text is read as markup. ``width``: if it is no terminal."""
    stream = sys.stderr if err else sys.stdout
    stream = getattr(stream, "unguarded", stream)
    made = _Console(file=stream, markup=False, emoji=False, highlight=False)
    if width is not None and not made.is_terminal:
        made.width = width
    return made


# -- what others print ----------------------------------------------------------------------------

#: A carriage return is sent: progress bars of libraries begin with it (``--verbose``).
_RETURNS = re.compile(r"(\r+)")


class Guarded:
    """A stream for tracebacks, errors of usage and logs of libraries: control characters are shown."""

    def __init__(self, unguarded: Any) -> None:
        self.unguarded = unguarded

    def write(self, text: str) -> int:
        parts = _RETURNS.split(text)
        self.unguarded.write(
            "".join(part if part[:1] == "\r" else printable(part) for part in parts)
        )
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


# -- numbers --------------------------------------------------------------------------------------


def count(number: int, noun: str) -> str:
    """``"1 chunk"``, ``"2,000 chunks"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def shown_sources(sources: Iterable[str]) -> dict[str, str]:
    """How each document is shown: a file below the working directory by its path from there."""
    here = ""
    with suppress(OSError):  # the directory is gone
        here = os.path.join(os.getcwd(), "")
    names = set(sources)
    shown = {name: name.removeprefix(here) for name in names}
    # an upload may have the name by which a file would be shown
    return {name: short_name(name) if path in names else path for name, path in shown.items()}


def shown_pages(label: str) -> str:
    """``page 3`` or ``pages 3–4`` for the label of pages; empty without pages."""
    return f"page{'s' * ('–' in label)} {label}" if label else ""
