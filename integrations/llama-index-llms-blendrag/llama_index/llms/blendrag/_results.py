"""Answers as LlamaIndex's responses: calls as blocks, log probabilities, usage and metrics in ``raw``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LogProb,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)

if TYPE_CHECKING:
    from blendrag.engine import Answer
    from blendrag.frameworks.tools import Parsed, ToolCall


def raw(answer: Answer, model_name: str) -> dict[str, Any]:
    """``usage`` is where token counters look; ``blendrag`` holds the metrics of the request."""
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
    """Of each token of the answer: itself first, then the likeliest others that were asked for."""
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


def calls(parsed: Parsed) -> dict[str, Any]:
    """A message of the assistant, what it says and then the calls it makes, and what was no call."""
    blocks: list[Any] = [TextBlock(text=parsed.text)] if parsed.text or not parsed.calls else []
    blocks += [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments)
        for call in parsed.calls
    ]
    # where LlamaIndex looks for calls when it streams structured output
    known = {"tool_calls": [_as_openai(call) for call in parsed.calls]} if parsed.calls else {}
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=known)
    about: dict[str, Any] = {"message": message}
    if parsed.invalid:
        invalid = [{"text": call.text, "error": call.error} for call in parsed.invalid]
        about["additional_kwargs"] = {"invalid_tool_calls": invalid}
    return about


def _as_openai(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


def completion(text: str, delta: str | None, **about: Any) -> CompletionResponse:
    """``text`` so far, ``delta`` the newest piece of it."""
    return CompletionResponse(text=text, delta=delta, **about)


def chat(text: str, delta: str | None, **about: Any) -> ChatResponse:
    """:func:`completion` as a message of the assistant, unless ``about`` brings one."""
    plain = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(**{"message": plain, **about}, delta=delta)
