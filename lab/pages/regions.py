"""Pages that programs write: docs/performance.md and docs/quality.md.

A page is prose with regions. Programs replace the text between ``<!-- bench:NAME -->`` and
``<!-- /bench:NAME -->``; people write everything else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blendrag.errors import InvalidInputError
from blendrag_lab.plots import write_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_REGION = re.compile(
    r"^(<!-- bench:(\S+) -->\n)(.*?)^(<!-- /bench:\2 -->)$", re.DOTALL | re.MULTILINE
)


def console(commands: Sequence[str]) -> str:
    """The commands that made what follows, as a code block."""
    return "\n".join(["```console", *(f"$ {command}" for command in commands), "```"])


def picture(figure: Figure, page: Path, name: str, caption: str) -> str:
    """Write ``name.png`` to the folder named like ``page``, and return the Markdown that shows it."""
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    write_png(figure, folder / f"{name}.png")
    return f"![{caption}]({folder.name}/{name}.png)"


def read_page(page: Path) -> str:
    """The page's text; raises :class:`InvalidInputError`."""
    try:
        return page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InvalidInputError(
            f"{page} cannot be read ({reason}), expected the page with its regions; name its folder with "
            "--out"
        ) from exc


def regions_of(page: Path) -> list[str]:
    return [match[2] for match in _REGION.finditer(read_page(page))]


def write_regions(page: Path, texts: Mapping[str, str]) -> None:
    """Replace the regions named in ``texts``; the rest of the page does not change."""

    def replaced(match: re.Match[str]) -> str:
        opening, name, _, closing = match.groups()
        return f"{opening}\n{texts[name]}\n\n{closing}" if name in texts else match[0]

    page.write_text(_REGION.sub(replaced, read_page(page)), encoding="utf-8")
