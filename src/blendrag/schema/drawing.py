"""The layout of a schema for people: an outline of its parts, and a picture of where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from blendrag.schema.layout import Layout
from blendrag.schema.nodes import Module, Node, Parameter, Role, Text, Union, children_of

_PREVIEW_CHARS = 48
_WIDTH, _ROW, _CHAR = 1200, 22, 7.3  # of the picture and of one letter, in pixels
_FILLS = {
    "module": "#cfe2f3",
    "union": "#fff2cc",
    "param": "#f4cccc",
    "text": "#eeeeee",
    "role": "#d9ead3",
}


@dataclass(frozen=True)
class Drawn:
    """One part of a schema. Positions are ``start`` to ``start + length``, the latter excluded."""

    kind: str
    """``module``, ``union``, ``param``, ``text`` or ``role``."""
    label: str
    start: int
    length: int
    guide: str = ""
    """Lines that connect it with the part around it."""


def outline(layout: Layout, plain: Callable[[str], str] = str) -> Iterator[Drawn]:
    """All parts in the order of the schema. ``plain`` gives the text to show for a text."""

    def below(nodes: tuple[Node, ...], around: str) -> Iterator[Drawn]:
        for i, node in enumerate(nodes):
            is_last = i == len(nodes) - 1
            yield _drawn(node, layout, plain, around + ("└── " if is_last else "├── "))
            yield from below(children_of(node), around + ("    " if is_last else "│   "))

    yield from below(layout.schema.children, "")


def _drawn(node: Node, layout: Layout, plain: Callable[[str], str], guide: str = "") -> Drawn:
    match node:
        case Text():
            words = " ".join(plain(node.text).split())
            cut = words[: _PREVIEW_CHARS - 1] + "…" if len(words) > _PREVIEW_CHARS else words
            kind, label = "text", f'"{cut}"'
        case Parameter() | Module():
            kind, label = "param" if isinstance(node, Parameter) else "module", node.name
        case Role():
            kind, label = "role", node.role
        case _:
            kind, label = "union", ""
    extent = layout[node]
    return Drawn(kind, label, extent.start, extent.length, guide)


def svg(layout: Layout, plain: Callable[[str], str] = str) -> str:
    """A picture: positions from left to right, nested parts below, members of a union below each other."""
    scale = _WIDTH / max(layout.tokens, 1)
    shapes: list[str] = []

    def draw(node: Node, row: int) -> int:
        """Draw ``node`` from ``row`` on; returns the row after it."""
        part = _drawn(node, layout, plain)
        shapes.append(_rectangle(part, row, scale))
        end = row + 1
        for child in children_of(node):
            below = draw(child, end if isinstance(node, Union) else row + 1)
            end = below if isinstance(node, Union) else max(end, below)
        return end

    rows = max((draw(node, 1) for node in layout.schema.children), default=1)
    height = rows * _ROW
    title = (
        f"{layout.schema.name}: {layout.tokens:,} positions; blue: modules, yellow: unions, red: parameters, "
        "grey: text"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" font-family="monospace" font-size="12">\n'
        f'<text x="2" y="15">{escape(title)}</text>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def _rectangle(part: Drawn, row: int, scale: float) -> str:
    x, y, width = part.start * scale, row * _ROW, part.length * scale
    name = f"{part.kind} {part.label}".strip()
    fits = (part.label or part.kind)[: max(int((width - 6) // _CHAR), 0)]
    where = f"{name}: {part.start:,} to {part.start + part.length:,}"
    return (
        f'<g><title>{escape(where)}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" '
        f'height="{_ROW - 2}" fill="{_FILLS[part.kind]}" stroke="#888888" stroke-width="0.5"/>'
        f'<text x="{x + 3:.1f}" y="{y + 14}">{escape(fits)}</text></g>'
    )
