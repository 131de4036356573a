"""What an answer cost, in the places where LangChain users look for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blendrag.engine import Answer


def token_usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Sums over ``answers``; ``reused_tokens`` are those prompt tokens whose KV was loaded."""
    prompt = sum(answer.metrics.prompt_tokens for answer in answers)
    completion = sum(answer.metrics.new_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "reused_tokens": sum(answer.metrics.reused_tokens for answer in answers),
    }


def generation_info(answer: Answer, model_name: str) -> dict[str, Any]:
    """``blendrag`` holds the metrics: TTFT, reused tokens, and for each chunk what happened."""
    return {
        "finish_reason": answer.finish_reason,
        "model_name": model_name,
        "token_usage": token_usage([answer]),
        "blendrag": answer.metrics.as_dict(),
    }
