"""The parts that a prompt over a schema consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from blendrag.schema.nodes import Argument, Module, Parameter, Text


@dataclass(frozen=True)
class CachedText:
    """A text of the schema."""

    text: Text
    module: Module | None
    """``None`` for text outside of modules, which is encoded by itself."""


@dataclass(frozen=True)
class FilledParameter:
    """A parameter of a module and its argument, which is not cached."""

    parameter: Parameter
    module: Module
    argument: Argument


@dataclass(frozen=True)
class UncachedText:
    """A text of the prompt."""

    text: Text


Part: TypeAlias = CachedText | FilledParameter | UncachedText
