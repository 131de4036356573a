"""Prompts of schemas (Prompt Cache) on their way through a framework, which passes on texts and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from blendrag.errors import InvalidInputError

if TYPE_CHECKING:
    from blendrag.engine import SchemaPrompt

#: Additional argument of a message that holds markup.
MARKED = "blendrag_schema_prompt"
#: Attributes are quoted. Whitespace that is written otherwise is changed by XML, or is layout.
_ENTITIES = {'"': "&quot;", "'": "&apos;", "\n": "&#10;", "\r": "&#13;", "\t": "&#9;"}


class SchemaMarkup(str):
    """``<prompt schema="…">…</prompt>`` from a template. Other texts that look like it are text."""


def filled(template: str, values: Mapping[str, Any]) -> SchemaMarkup:
    """``template`` with ``{name}`` replaced by values, which never become markup."""
    return SchemaMarkup(template.format(**{k: _escaped(str(v)) for k, v in values.items()}))


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
