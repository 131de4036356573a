"""A chat request: LangChain's messages and arguments of a call → what the engine is asked.

Owns what ``tools``, ``tool_choice`` and ``response_format`` mean to a local model. Does not know what
becomes of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage, get_buffer_string

from blendrag.errors import InvalidInputError
from blendrag.frameworks.fields import RequestFields
from blendrag.frameworks.tool_choice import chosen_tool, json_instruction, opening_for
from langchain_blendrag._messages import Message, to_dicts

if TYPE_CHECKING:
    from blendrag.engine import Options, Prompt


@dataclass(frozen=True)
class ChatRequest:
    """What the engine is asked. ``options.opening`` begins the answer, which must be a call then."""

    prompt: Prompt
    options: Options


def make_request(
    fields: RequestFields,
    messages: Sequence[BaseMessage],
    stop: Sequence[str] | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: Any = None,
    response_format: Mapping[str, Any] | None = None,
    **call: Any,
) -> ChatRequest:
    """May open the tokenizer, where there are tools. Does not modify ``messages``.

    Raises :class:`InvalidInputError` for what cannot be asked of this model.
    """
    choice = chosen_tool(tool_choice, tools or ())
    offered = () if choice == "none" else tuple(tools or ())
    options = fields.request_options(stop, **call, tools=offered or None)
    if not options.apply_chat_template:
        return ChatRequest(_flattened(messages, offered), options)
    asked = to_dicts(messages)
    instruction = _instruction(response_format)
    if instruction:
        asked = with_instruction(asked, instruction)
    if offered:
        opening = opening_for(fields.engine.resources.tokens, choice, offered)
        options = replace(options, opening=opening)
    return ChatRequest(tuple(asked), options)


def _flattened(messages: Sequence[BaseMessage], tools: Sequence[Any]) -> str:
    if tools:
        raise InvalidInputError(
            f"apply_chat_template=False with tools ({len(tools)}), which reach a model through its "
            "chat template; leave one of them out"
        )
    to_dicts(messages)  # refuses what is not text
    return get_buffer_string(messages)


def _instruction(response_format: Mapping[str, Any] | None) -> str:
    """OpenAI's ``response_format`` in words."""
    kind = (response_format or {"type": "text"}).get("type")
    if kind == "text":
        return ""
    if kind == "json_object":
        return json_instruction(None)
    if kind == "json_schema" and response_format is not None:
        return json_instruction(response_format["json_schema"]["schema"])
    raise InvalidInputError(
        f"response_format of type {kind!r} is not one of text, json_object, json_schema"
    )


def with_instruction(messages: Sequence[Message], instruction: str) -> list[Message]:
    """``instruction`` behind the last message, where that is the user's, else in one of its own."""
    *before, last = messages
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": instruction}]
    return [*before, {**last, "content": f"{last['content']}\n\n{instruction}"}]
