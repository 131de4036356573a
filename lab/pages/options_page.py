"""Writes the table of docs/options.md: ``python -m lab.pages.options_page``."""

from __future__ import annotations

from pathlib import Path

from blendrag.config import OPTIONS, Settings
from blendrag.option import Option
from blendrag.store.durable import readable_size

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
TABLE = "| option | default | values | where | |\n|---|---|---|---|---|\n"
#: Kinds of which nothing is to be said.
_PLAIN = ("a text", "a path", "a model", "loaded")


def page(written: str) -> str:
    """The page ``written``, whose last part is the table, with the table of today."""
    return written.partition(TABLE)[0] + TABLE + "".join(map(_row, OPTIONS.values()))


def _row(option: Option) -> str:
    default = option.unless_given or getattr(Settings(), option.name, None)
    if isinstance(default, int) and option.name.endswith("_bytes"):
        default = readable_size(default)
    shown = "" if default is None or default == {} else f"{default}"
    values = "" if option.expected in _PLAIN else option.expected
    cells = (f"`{option.name}`", shown, values, option.where.replace(" ", ", "), option.help)
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
