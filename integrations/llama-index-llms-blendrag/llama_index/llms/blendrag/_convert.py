"""Between LlamaIndex and the engine: messages for chat templates, answers as responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from blendrag.chat.messages import arguments_of, cleaned
from blendrag.chat.reply import Reply
from blendrag.errors import InvalidOptionError

if TYPE_CHECKING:
    from blendrag.chat.calls import ToolCall
    from blendrag.engine import Answer

#: One message as Hugging Face chat templates read it.
Message = dict[str, Any]


def to_dicts(messages: Sequence[ChatMessage]) -> list[Message]:
    """Role, text, reasoning and tool calls of each message. Does not modify ``messages``.

    Raises :class:`InvalidInputError` for content that is not text.
    """
    return cleaned([_to_dict(message, f"messages[{i}]") for i, message in enumerate(messages)])


def _to_dict(message: ChatMessage, field: str) -> Message:
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(message.blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.content or "")
        elif isinstance(block, ToolCallBlock):
            calls.append(
                {"id": block.tool_call_id, "name": block.tool_name, "arguments": block.tool_kwargs}
            )
        elif not isinstance(block, CachePoint):
            raise InvalidOptionError(
                f"{field}.content[{number}]",
                f"is a content block of type {block.block_type!r}, expected text only; describe it in words "
                "or leave it out",
            )
    fields = message.additional_kwargs
    converted: Message = {"role": message.role.value, "content": "\n".join(texts)}
    if thoughts:
        converted["reasoning_content"] = "".join(thoughts)
    if calls or fields.get("tool_calls"):
        converted["tool_calls"] = calls or [_from_openai(each) for each in fields["tool_calls"]]
    names = ("tool_call_id", "name", "function_call", "reasoning_content")
    return {**{name: fields[name] for name in names if fields.get(name)}, **converted}


def _from_openai(call: Any) -> Any:
    """A call of another LLM's answer, which may be an object of OpenAI's client."""
    return call.model_dump() if hasattr(call, "model_dump") else call


def arguments(block: ToolCallBlock) -> dict[str, Any]:
    """Arguments as a dictionary, for a tool; empty if they are none."""
    read = arguments_of(block.tool_kwargs)
    return read if isinstance(read, dict) else {}


# -- answers -----------------------------------------------------------------------------------------


def raw(answer: Answer, model_name: str) -> dict[str, Any]:
    """``usage`` is read by token counters; ``blendrag`` holds the metrics of the request."""
    metrics = answer.metrics
    return {
        "model": model_name,
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": metrics.prompt_tokens,
            "completion_tokens": metrics.new_tokens,
            "total_tokens": metrics.prompt_tokens + metrics.new_tokens,
            "prompt_tokens_details": {"cached_tokens": metrics.reused_tokens},
            "reused_tokens": metrics.reused_tokens,
        },
        "blendrag": metrics.as_dict(),
    }


def logprobs(answer: Answer) -> list[list[LogProb]] | None:
    """For each token of the answer: itself first, then the most likely others if requested."""
    if answer.logprobs is None:
        return None
    return [
        [
            _logprob(chosen.token, chosen.logprob),
            *(_logprob(token, value) for token, value in chosen.top if token != chosen.token),
        ]
        for chosen in answer.logprobs
    ]


def _logprob(token: str, value: float) -> LogProb:
    return LogProb(token=token, logprob=value, bytes=list(token.encode("utf-8", "replace")))


def message_of(parsed: Reply) -> dict[str, Any]:
    """The assistant's message with thoughts, text and calls, and the calls that cannot be read."""
    blocks: list[Any] = [ThinkingBlock(content=parsed.reasoning)] if parsed.reasoning else []
    blocks += [TextBlock(text=parsed.text)] if parsed.text or not parsed.calls else []
    blocks += [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments)
        for call in parsed.calls
    ]
    # LlamaIndex looks here for calls when it streams structured output
    known = {"tool_calls": [_as_openai(call) for call in parsed.calls]} if parsed.calls else {}
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=known)
    fields: dict[str, Any] = {"message": message}
    if parsed.invalid:
        invalid = [{"text": call.text, "error": call.error} for call in parsed.invalid]
        fields["additional_kwargs"] = {"invalid_tool_calls": invalid}
    return fields


def _as_openai(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


def completion(said: str | Reply, delta: str | None, **fields: Any) -> CompletionResponse:
    """A response with the text so far or the whole reply, and ``delta``, its newest piece."""
    if isinstance(said, str):
        return CompletionResponse(text=said, delta=delta, **fields)
    if said.reasoning:
        fields["additional_kwargs"] = {"reasoning_content": said.reasoning}
    return CompletionResponse(text=said.text, delta=delta, **fields)


def chat(said: str | Reply, delta: str | None, **fields: Any) -> ChatResponse:
    """:func:`completion` as a message of the assistant."""
    if isinstance(said, str):
        message = ChatMessage(role=MessageRole.ASSISTANT, content=said)
        return ChatResponse(message=message, delta=delta, **fields)
    return ChatResponse(delta=delta, **{**message_of(said), **fields})
