"""LlamaIndex chat messages → the dictionaries a Hugging Face chat template reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from blendrag.errors import InvalidInputError
from llama_index.llms.blendrag._tools import arguments

Message = dict[str, Any]

#: Roles that templates do not know, by those they do.
_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}


def to_dicts(messages: Sequence[ChatMessage]) -> list[Message]:
    """Role, text and tool calls of each message. Does not modify ``messages``.

    Raises :class:`InvalidInputError` for content that is not text; a model's own earlier thinking is
    left out, as chat templates want it.
    """
    return [_to_dict(message) for message in messages]


def _to_dict(message: ChatMessage) -> Message:
    texts, calls = [], []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolCallBlock):
            function = {"name": block.tool_name, "arguments": arguments(block)}
            calls.append({"type": "function", "id": block.tool_call_id, "function": function})
        elif not isinstance(block, ThinkingBlock | CachePoint):
            raise InvalidInputError(
                f"a content block of type {block.block_type!r}, and only text can be read; say it in words "
                "or leave it out"
            )
    converted: Message = {
        "role": _ROLES.get(message.role, message.role.value),
        "content": "\n".join(texts),
    }
    if calls:
        converted["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if name in message.additional_kwargs:
            converted[name] = message.additional_kwargs[name]
    return converted
