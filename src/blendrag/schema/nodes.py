"""What a schema and a prompt consist of, as :mod:`blendrag.schema.markup` parses them.

::

    Schema                      PromptMarkup
    ├── Text                    ├── Text              not cached
    ├── Role                    ├── Role
    │   └── … as in Schema      │   └── … as in PromptMarkup
    ├── Union                   └── Import
    │   └── Module                  ├── Argument
    └── Module                      └── Text, Import
        └── Text, Parameter, Module, Union, Role

Nodes are compared by identity, and a layout maps each to its positions: two equal texts of a schema are two
parts of it. ``at`` is where a node begins in its file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar

#: Tags that stand for the roles of a chat template.
ROLES = ("system", "user", "assistant")


class Location(NamedTuple):
    """A place in a file. Lines and columns count from 1."""

    file: str
    line: int
    column: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, eq=False, slots=True)
class Text:
    """Text without tags. In a schema it is cached; outside of modules it is part of every prompt."""

    text: str
    at: Location


@dataclass(frozen=True, eq=False, slots=True)
class Parameter:
    """A place in a module for an argument of at most ``max_tokens`` tokens."""

    name: str
    max_tokens: int
    at: Location


@dataclass(frozen=True, eq=False, slots=True)
class Role:
    """Content that the chat template wraps. ``role`` is one of :data:`ROLES`."""

    role: str
    children: tuple[Node, ...]
    at: Location


@dataclass(frozen=True, eq=False, slots=True)
class Module:
    """Text that a prompt imports by name. Modules inside it are imported inside its import."""

    name: str
    children: tuple[SchemaNode, ...]
    at: Location


@dataclass(frozen=True, eq=False, slots=True)
class Union:
    """Modules of which a prompt imports at most one. They begin at the same position."""

    members: tuple[Module, ...]
    at: Location


@dataclass(frozen=True, eq=False)
class Scaffold:
    """Modules that are also encoded together, for prompts that import all of them."""

    modules: tuple[str, ...]
    at: Location


@dataclass(frozen=True)
class ModulePlace:
    """What is around a module."""

    parents: tuple[Module, ...] = ()
    """The modules it is nested in, outermost first."""
    choices: tuple[tuple[Union, Module], ...] = ()
    """The unions around it, and the member of each that it is, or is in."""
    in_role: bool = False


@dataclass(frozen=True, eq=False)
class Schema:
    """A parsed schema. Names of modules are unique in it."""

    name: str
    children: tuple[SchemaNode, ...]
    scaffolds: tuple[Scaffold, ...]
    at: Location

    @cached_property
    def modules(self) -> dict[str, Module]:
        """All modules by name, in the order of the schema, nested ones after the module around them."""
        return {node.name: node for node in walk(self.children) if isinstance(node, Module)}

    @cached_property
    def places(self) -> dict[str, ModulePlace]:
        return dict(_places(self.children, ModulePlace()))


def _places(nodes: Iterable[Node], around: ModulePlace) -> Iterator[tuple[str, ModulePlace]]:
    for node in nodes:
        if isinstance(node, Union):
            for member in node.members:
                yield from _places(
                    [member], replace(around, choices=(*around.choices, (node, member)))
                )
        elif isinstance(node, Role):
            yield from _places(node.children, replace(around, in_role=True))
        elif isinstance(node, Module):
            yield node.name, around
            yield from _places(node.children, replace(around, parents=(*around.parents, node)))


@dataclass(frozen=True, eq=False, slots=True)
class Argument:
    """The value of a parameter in an import."""

    name: str
    text: str
    at: Location


@dataclass(frozen=True, eq=False, slots=True)
class Import:
    """A module that a prompt uses, with the modules and texts that are imported inside it."""

    name: str
    arguments: tuple[Argument, ...]
    children: tuple[Import | Text, ...]
    at: Location


@dataclass(frozen=True, eq=False)
class PromptMarkup:
    """A parsed prompt of the schema named ``schema``."""

    schema: str
    children: tuple[PromptNode, ...]
    at: Location


SchemaNode: TypeAlias = Text | Parameter | Module | Union | Role
PromptNode: TypeAlias = Text | Import | Role
Node: TypeAlias = SchemaNode | PromptNode
Root = TypeVar("Root", Schema, PromptMarkup)


def children_of(node: Node) -> tuple[Node, ...]:
    """The nodes directly inside ``node``."""
    if isinstance(node, Union):
        return node.members
    return node.children if isinstance(node, Module | Role | Import) else ()


def walk(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """``nodes`` and all nodes inside them, in the order of the file."""
    for node in nodes:
        yield node
        yield from walk(children_of(node))


def without_roles(nodes: Iterable[Node]) -> Iterator[Node]:
    """``nodes`` with the content of roles in place of the roles."""
    for node in nodes:
        if isinstance(node, Role):
            yield from without_roles(node.children)
        else:
            yield node


def with_role_texts(root: Root, texts: Callable[[Role], tuple[str, str]]) -> Root:
    """``root`` with each role replaced by its content between the two texts that ``texts`` gives for it.

    Neighbouring texts become one, so that they are tokenised together.
    """

    return replace(root, children=joined_texts(_with_role_texts(root.children, texts)))


def _with_role_texts(
    nodes: Iterable[Node], texts: Callable[[Role], tuple[str, str]]
) -> Iterator[Node]:
    for node in nodes:
        if isinstance(node, Role):
            before, after = texts(node)
            yield Text(before, node.at)
            yield from _with_role_texts(node.children, texts)
            yield Text(after, node.at)
        elif isinstance(node, Module):
            yield replace(node, children=joined_texts(_with_role_texts(node.children, texts)))
        elif isinstance(node, Union):
            yield replace(node, members=joined_texts(_with_role_texts(node.members, texts)))
        else:
            yield node


def joined_texts(nodes: Iterable[Node]) -> tuple[Any, ...]:
    """``nodes`` with neighbouring texts as one, and without empty ones."""
    joined: list[Node] = []
    for node in nodes:
        if not isinstance(node, Text):
            joined.append(node)
        elif joined and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + node.text, joined[-1].at)
        elif node.text:
            joined.append(node)
    return tuple(joined)
