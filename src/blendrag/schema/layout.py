"""Positions of the parts of a schema, and of the prompts that derive from it (Prompt Cache, §3.3 and §3.4).

The parts of a schema follow each other. The members of a union begin at the same position, and the union is
as long as its longest member. A parameter takes ``max_tokens`` positions. The parts of a prompt keep these
positions; those of modules that are not imported stay unused. Text of the prompt begins where the parts
before it end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from blendrag.schema.nodes import (
    Module,
    Node,
    Parameter,
    Schema,
    Text,
    Union,
    children_of,
    without_roles,
)
from blendrag.schema.parts import CachedText, FilledParameter, Part

#: Tokens of a text.
CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Extent:
    """Positions ``start`` to ``end``, the latter excluded."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Layout:
    """The positions of a schema's nodes. A module's cover those of the modules in it."""

    schema: Schema
    extents: Mapping[Node, Extent]
    tokens: int
    """End of the last part: positions that the schema takes, and those before it."""

    def __getitem__(self, node: Node | str) -> Extent:
        """The positions of a node, or of the module of that name."""
        return self.extents[self.schema.modules[node] if isinstance(node, str) else node]

    def place(self, parts: Sequence[Part], count_tokens: CountTokens) -> list[Extent]:
        """The positions of each part of a prompt, in the order of ``parts``.

        A parameter has its whole slot; an argument takes the first positions of it. Uncached text
        begins at the end of all parts before it, and may overlap the parts after it.
        """
        placed, end = [], self._first
        for part in parts:
            if isinstance(part, CachedText):
                extent = self[part.text]
            elif isinstance(part, FilledParameter):
                extent = self[part.parameter]
            else:
                extent = Extent(end, count_tokens(part.text.text))
            end = max(end, extent.end)
            placed.append(extent)
        return placed

    @property
    def _first(self) -> int:
        children = self.schema.children
        return self.extents[children[0]].start if children else 0


def lay_out(schema: Schema, count_tokens: CountTokens, first: int = 0) -> Layout:
    """The positions of ``schema``, whose first token is at ``first``.

    Roles take no positions: replace them by texts before (:func:`blendrag.schema.nodes.with_role_texts`).
    """
    extents: dict[Node, Extent] = {}

    def follow(nodes: Iterable[Node], start: int) -> int:
        for node in nodes:
            if isinstance(node, Text):
                end = start + count_tokens(node.text)
            elif isinstance(node, Parameter):
                end = start + node.max_tokens
            elif isinstance(node, Union):
                end = max(follow([member], start) for member in node.members)
            else:
                end = follow(children_of(node), start)
            extents[node] = Extent(start, end - start)
            start = end
        return start

    end = follow(schema.children, first)
    return Layout(schema, extents, end)


def own_parts(module: Module) -> list[Text | Parameter]:
    """The texts and parameters of a module, without those of the modules in it."""
    return [node for node in without_roles(module.children) if isinstance(node, Text | Parameter)]
