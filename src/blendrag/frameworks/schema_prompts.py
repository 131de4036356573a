"""Prompts of schemas (Prompt Cache) on their way through a framework, which passes on texts and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from blendrag.errors import InvalidInputError

if TYPE_CHECKING:
    from blendrag.engine import SchemaPrompt

#: Additional argument of a message that holds markup.
MARKED = "blendrag_schema_prompt"
#: Attributes are quoted. Whitespace that is written otherwise is changed by XML, or is layout.
_ENTITIES = {'"': "&quot;", "'": "&apos;", "\n": "&#10;", "\r": "&#13;", "\t": "&#9;"}
_BRACES = "write {{ and }} for braces in text"


class SchemaMarkup(str):
    """``<prompt schema="…">…</prompt>`` from a template. Other texts that look like it are text."""


def variables_of(template: str) -> list[str]:
    """The names in braces. Raises :class:`InvalidInputError` for anything else in braces."""
    try:
        found = dict.fromkeys(
            name for _, name, *_ in Formatter().parse(template) if name is not None
        )
    except (ValueError, TypeError) as exc:
        raise InvalidInputError(
            f"template {template!r:.80}: {exc}, expected variables as in {{name}}; {_BRACES}"
        ) from exc
    for name in found:
        if not name.isidentifier():
            raise InvalidInputError(
                f"{{{name:.40}}} in a template, expected variables as in {{name}}; {_BRACES}"
            )
    return list(found)


def filled(template: str, values: Mapping[str, Any]) -> SchemaMarkup:
    """``template`` with ``{name}`` replaced by values, which never become markup."""
    names = variables_of(template)
    if missing := [name for name in names if name not in values]:
        raise InvalidInputError(
            f"no value for {', '.join(missing)} of the template, expected {', '.join(names)}; {_BRACES}"
        )
    return SchemaMarkup(template.format(**{name: _escaped(str(values[name])) for name in names}))


def _escaped(value: str) -> str:
    first = "&#32;" if value.startswith(" ") else ""
    return first + escape(value[bool(first) :], _ENTITIES)


def from_text(prompt: str) -> SchemaPrompt | None:
    """The prompt of a schema that ``prompt`` is, if it is one."""
    from blendrag.engine import SchemaPrompt

    return SchemaPrompt(str(prompt)) if isinstance(prompt, SchemaMarkup) else None


def from_messages(messages: Sequence[Any]) -> SchemaPrompt | None:
    """The same for messages with ``content`` and ``additional_kwargs``, of either framework."""
    from blendrag.engine import SchemaPrompt

    marked = [message for message in messages if message.additional_kwargs.get(MARKED)]
    if not marked:
        return None
    if len(messages) > 1:
        raise InvalidInputError(
            f"a prompt of a schema among {len(messages)} messages, expected it alone; write the others into "
            "it, as <system>, <user> and <assistant>"
        )
    return SchemaPrompt(str(marked[0].content))
