"""A prompt against its schema (Prompt Cache, §3.4): the parts it consists of, or what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from blendrag.errors import SchemaError
from blendrag.schema.layout import CountTokens, Extent
from blendrag.schema.markup import suggestion
from blendrag.schema.nodes import (
    Argument,
    Import,
    Module,
    Node,
    Parameter,
    PromptMarkup,
    Role,
    Schema,
    Text,
    Union,
    without_roles,
)
from blendrag.schema.parts import CachedText, FilledParameter, Part, UncachedText
from blendrag.wording import quoted


def resolve(schema: Schema, prompt: PromptMarkup) -> list[Part]:
    """The parts of ``prompt`` in reading order. Raises :class:`SchemaError` if it does not fit ``schema``.

    Imports stand in the order of the prompt, and before each the text of the schema that precedes it there.
    Text of the prompt stands between two imports: in place of the first module between them that is left out,
    else directly after the first of the two. Text after the last import stands at the end.
    """
    if prompt.schema != schema.name:
        raise SchemaError(
            prompt.at,
            f"this prompt is for schema {quoted(prompt.schema)}, expected {schema.name!r}",
        )
    return list(_Resolver(schema).parts(None, prompt.children, {}))


def check_lengths(parts: Sequence[Part], count_tokens: CountTokens) -> None:
    """Raise :class:`SchemaError` for an argument that is longer than its parameter."""
    for wrong in length_errors(parts, count_tokens):
        raise wrong


def length_errors(parts: Sequence[Part], count_tokens: CountTokens) -> Iterator[SchemaError]:
    """An error for each argument that is longer than its parameter."""
    for part in parts:
        if isinstance(part, FilledParameter):
            tokens, most = count_tokens(part.argument.text), part.parameter.max_tokens
            if tokens > most:
                yield SchemaError(
                    part.argument.at,
                    f"{part.argument.name:.80}={quoted(part.argument.text, 60)} has {tokens:,} "
                    "tokens, expected at "
                    f"most {most:,} ({part.parameter.at}); shorten it",
                )


def check_context(parts: Sequence[Part], extents: Sequence[Extent], context_tokens: int) -> None:
    """Raise :class:`SchemaError` for the first part that ends behind the context of the model."""
    for part, extent in zip(parts, extents, strict=True):
        if extent.end > context_tokens:
            at = part.parameter.at if isinstance(part, FilledParameter) else part.text.at
            raise SchemaError(
                at,
                f"this part of the prompt takes positions {extent.start:,} to {extent.end:,}, expected at "
                f"most {context_tokens:,}, the context of the model; shorten it or the schema, or put "
                "modules of which a prompt needs one into a <union>",
            )


class _Resolver:
    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def parts(
        self, module: Module | None, nodes: Sequence[Node], arguments: dict[str, Argument]
    ) -> Iterator[Part]:
        """The parts of one level: of the whole prompt, or of an imported module.

        ``nodes``: the texts and imports of the prompt at this level.
        """
        slots = list(without_roles(module.children if module else self._schema.children))
        at_slot = {name: i for i, slot in enumerate(slots) for name in _names(slot)}
        imports = self._checked(module, nodes, at_slot)
        left_out = _next_left_out(slots, {at_slot[name] for name in imports})
        items = list(without_roles(nodes))
        slot_of = [at_slot[item.name] if isinstance(item, Import) else None for item in items]
        following = _following(slot_of)
        done, previous = 0, None  # slots before ``done`` are written; slot of the import before

        def fixed(end: int) -> Iterator[Part]:
            """The texts and parameters before slot ``end`` that are not written yet."""
            nonlocal done
            while done < end:
                slot = slots[done]
                done += 1
                if isinstance(slot, Text):
                    yield CachedText(slot, module)
                elif isinstance(slot, Parameter):
                    assert module is not None
                    yield FilledParameter(slot, module, arguments[slot.name])

        for item, slot, after in zip(items, slot_of, following, strict=True):
            if slot is not None:
                assert isinstance(item, Import)
                yield from fixed(slot)
                yield from self._imported(item)
                previous = slot
                continue
            assert isinstance(item, Text)
            if after is None:
                yield from fixed(len(slots))
            else:
                gap = left_out[0 if previous is None else previous + 1]
                if gap < after:
                    yield from fixed(gap)
                elif previous is None:
                    yield from fixed(after)
            yield UncachedText(item)
        yield from fixed(len(slots))

    def _imported(self, item: Import) -> Iterator[Part]:
        module = self._schema.modules[item.name]
        arguments = {argument.name: argument for argument in item.arguments}
        parameters = [
            node.name for node in without_roles(module.children) if isinstance(node, Parameter)
        ]
        for name, argument in arguments.items():
            if name not in parameters:
                expected = ", ".join(parameters) or "no arguments"
                raise SchemaError(
                    argument.at,
                    f"module {module.name!r} has no parameter {quoted(name)}, expected {expected}"
                    f"{suggestion(name, parameters)}",
                )
        for name in parameters:
            if name not in arguments:
                raise SchemaError(
                    item.at,
                    f'argument {name!r} of module {module.name!r} is missing, expected {name}="…" in '
                    f'<{module.name}>; {name}="" leaves it empty',
                )
        return self.parts(module, item.children, arguments)

    def _checked(
        self, module: Module | None, nodes: Sequence[Node], at_slot: dict[str, int]
    ) -> dict[str, Import]:
        """The imports at one level, by name."""
        imports: dict[str, Import] = {}
        chosen: dict[int, Import] = {}
        for node, in_role in _with_role(nodes):
            if not isinstance(node, Import):
                continue
            if node.name not in at_slot:
                raise SchemaError(node.at, self._misplaced(module, node.name))
            if node.name in imports:
                raise SchemaError(
                    node.at,
                    f"module {node.name!r} is imported in line {imports[node.name].at.line} already, "
                    "expected one import",
                )
            other = chosen.setdefault(at_slot[node.name], node)
            if other is not node:
                raise SchemaError(
                    node.at,
                    f"module {node.name!r} is in one union with {other.name!r} (imported in line "
                    f"{other.at.line}), expected one of them",
                )
            if in_role and self._schema.places[node.name].in_role:
                raise SchemaError(
                    node.at,
                    f"module {node.name!r} is in a role of the schema already, expected its import outside "
                    "of roles",
                )
            imports[node.name] = node
        return imports

    def _misplaced(self, module: Module | None, name: str) -> str:
        place = self._schema.places.get(name)
        if place is None:
            names = [*islice(self._schema.modules, 9)]
            known = ", ".join(names[:8]) + ", …" * (len(names) > 8) if names else "no imports"
            return (
                f"schema {self._schema.name!r} has no module {quoted(name)}, expected {known}"
                f"{suggestion(name, self._schema.modules)}"
            )
        if not place.parents:
            assert module is not None
            return (
                f"module {name!r} is not inside {module.name!r}, expected its import outside of it"
            )
        names = [*(parent.name for parent in place.parents), name]
        opening = "".join(f"<{name}>" for name in names[:-1])
        closing = "".join(f"</{name}>" for name in reversed(names[:-1]))
        return (
            f"module {name!r} is nested in {names[-2]!r}, expected {opening}<{name}/>{closing} with the "
            "arguments of each"
        )


def _names(slot: Node) -> list[str]:
    """The modules that can be imported into a slot."""
    if isinstance(slot, Module):
        return [slot.name]
    return [member.name for member in slot.members] if isinstance(slot, Union) else []


def _with_role(nodes: Iterable[Node]) -> Iterator[tuple[Node, bool]]:
    for node in nodes:
        if isinstance(node, Role):
            yield from ((inner, True) for inner in node.children)
        else:
            yield node, False


def _next_left_out(slots: Sequence[Node], imported: set[int]) -> list[int]:
    """For each slot, and the end, the first one from there on that holds modules, none of them imported."""
    found = [len(slots)]
    for i in reversed(range(len(slots))):
        is_left_out = isinstance(slots[i], Module | Union) and i not in imported
        found.append(i if is_left_out else found[-1])
    return found[::-1]


def _following(slot_of: Sequence[int | None]) -> list[int | None]:
    """For each item, the slot of the first import after it."""
    following: list[int | None] = []
    last = None
    for slot in reversed(slot_of):
        following.append(last)
        last = last if slot is None else slot
    return following[::-1]
