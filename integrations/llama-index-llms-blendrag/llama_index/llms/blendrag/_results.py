"""Answers as LlamaIndex's responses, with usage and metrics in ``raw``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
)

if TYPE_CHECKING:
    from blendrag.engine import Answer


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
            "reused_tokens": metrics.reused_tokens,
        },
        "blendrag": metrics.as_dict(),
    }


def completion(text: str, delta: str | None, about: dict[str, Any] | None) -> CompletionResponse:
    """``text`` so far, ``delta`` the newest piece of it, ``about`` once the answer is whole."""
    return CompletionResponse(text=text, delta=delta, raw=about)


def chat(text: str, delta: str | None, about: dict[str, Any] | None) -> ChatResponse:
    """:func:`completion` as a message of the assistant."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, delta=delta, raw=about)
