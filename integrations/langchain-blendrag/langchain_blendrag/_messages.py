"""LangChain messages → the dictionaries a Hugging Face chat template reads, and a prompt of them.

``BaseLLM`` hands prompts on as plain strings and would flatten messages to "Human: …". A
:class:`RenderedPrompt` is such a string, the one the model will read, and remembers its messages, so
that the engine applies the template and nobody applies it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompt_values import PromptValue

from blendrag.errors import InvalidInputError

Message = dict[str, Any]

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (SystemMessage, "system"),
    (ToolMessage, "tool"),
    (FunctionMessage, "tool"),
)

#: Parts of an answer that repeat its ``tool_calls``, or that no template reads back.
_OF_ANSWERS = frozenset(
    {
        "tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call",
        "thinking", "redacted_thinking", "reasoning", "reasoning_content",
    }
)  # fmt: skip


class RenderedPrompt(str):
    """The text of a chat prompt after the model's template, with the messages it came from."""

    messages: tuple[Message, ...]

    def __new__(cls, text: str, messages: Sequence[Message]) -> RenderedPrompt:
        prompt = super().__new__(cls, text)
        prompt.messages = tuple(messages)
        return prompt

    def __getnewargs__(self) -> tuple[str, tuple[Message, ...]]:  # type: ignore[override]
        return str(self), self.messages


class TemplatedPromptValue(PromptValue):
    """Messages that become a string through ``render``, the model's chat template."""

    messages: list[BaseMessage]
    render: Callable[[Sequence[Message]], str]

    def to_string(self) -> str:
        messages = to_dicts(self.messages)
        return RenderedPrompt(self.render(messages), messages)

    def to_messages(self) -> list[BaseMessage]:
        return list(self.messages)


def engine_prompt(prompt: str) -> str | tuple[Message, ...]:
    """What the engine is to render: the messages behind ``prompt``, or ``prompt`` itself."""
    return prompt.messages if isinstance(prompt, RenderedPrompt) else prompt


def to_dicts(messages: Sequence[BaseMessage]) -> list[Message]:
    """Role, content, and what tool calls and their results carry. Does not modify ``messages``.

    Raises :class:`InvalidInputError` for content that is not text, and where nothing is said at all.
    """
    from blendrag.engine.rendering import refuse_silence

    converted = [_to_dict(message) for message in messages]
    refuse_silence(converted)
    return converted


def text_of(message: BaseMessage) -> str:
    """The text of ``message``. Raises :class:`InvalidInputError` for a part that is not text."""
    if isinstance(message.content, str):
        return message.content
    return "".join(_text_of_part(message, part) for part in message.content)


def _text_of_part(message: BaseMessage, part: str | dict[str, Any]) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind == "text":
        return str(part.get("text", ""))
    if isinstance(message, AIMessage) and kind in _OF_ANSWERS:
        return ""
    raise InvalidInputError(
        f"a {type(message).__name__} has a content part of type {kind!r}, and only text can be read; "
        "say it in words or leave it out"
    )


def _to_dict(message: BaseMessage) -> Message:
    converted: Message = {"role": _role_of(message), "content": text_of(message)}
    if isinstance(message, AIMessage):
        # what could not be read as a call is what the model wrote all the same
        converted["content"] += "".join(c["args"] or "" for c in message.invalid_tool_calls)
        if message.tool_calls:
            converted["tool_calls"] = [_call_dict(call) for call in message.tool_calls]
    if isinstance(message, ToolMessage):
        converted["tool_call_id"] = message.tool_call_id
    if message.name:
        converted["name"] = message.name
    return converted


def _call_dict(call: Mapping[str, Any]) -> Message:
    function = {"name": call["name"], "arguments": call["args"]}
    return {"type": "function", "id": call["id"], "function": function}


def _role_of(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES:
        if isinstance(message, kind):
            return role
    return message.type
