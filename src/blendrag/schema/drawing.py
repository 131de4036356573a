"""The layout of a schema for people: an outline of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from blendrag.schema.layout import Layout
from blendrag.schema.nodes import Module, Node, Parameter, Role, Text, children_of

_PREVIEW_CHARS = 48


@dataclass(frozen=True)
class Drawn:
    """One part of a schema. Positions are ``start`` to ``start + length``, the latter excluded."""

    kind: str
    """``module``, ``union``, ``param``, ``text`` or ``role``."""
    label: str
    start: int
    length: int
    guide: str
    """Lines that connect it with the part around it."""


def outline(layout: Layout, plain: Callable[[str], str] = str) -> Iterator[Drawn]:
    """All parts in the order of the schema. ``plain`` gives the text to show for a text."""

    def below(nodes: tuple[Node, ...], around: str) -> Iterator[Drawn]:
        for i, node in enumerate(nodes):
            is_last = i == len(nodes) - 1
            yield _drawn(node, layout, plain, around + ("└── " if is_last else "├── "))
            yield from below(children_of(node), around + ("    " if is_last else "│   "))

    yield from below(layout.schema.children, "")


def _drawn(node: Node, layout: Layout, plain: Callable[[str], str], guide: str) -> Drawn:
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
