"""LangChain messages → the dictionaries a Hugging Face chat template reads, and a prompt of them.

``BaseLLM`` hands prompts on as plain strings and would flatten messages to "Human: …". A
:class:`RenderedPrompt` is such a string, the one the model will read, and remembers its messages, so
that the engine applies the template and nobody applies it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

Message = dict[str, Any]

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (SystemMessage, "system"),
    (ToolMessage, "tool"),
    (FunctionMessage, "tool"),
)


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
    """Role, content, and what tool calls and their results carry. Does not modify ``messages``."""
    return [_to_dict(message) for message in messages]


def _to_dict(message: BaseMessage) -> Message:
    converted: Message = {"role": _role_of(message), "content": message.content}
    if isinstance(message, AIMessage) and message.tool_calls:
        converted["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": call["args"]},
            }
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        converted["tool_call_id"] = message.tool_call_id
    if message.name:
        converted["name"] = message.name
    return converted


def _role_of(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES:
        if isinstance(message, kind):
            return role
    return message.type
