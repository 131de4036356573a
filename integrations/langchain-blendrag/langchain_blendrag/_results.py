"""What an answer cost, in the places where LangChain users look for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

if TYPE_CHECKING:
    from blendrag.engine import Answer, TokenLogprob


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


def usage_metadata(answer: Answer) -> UsageMetadata:
    """``cache_read``: prompt tokens whose KV was loaded; ``cache_creation``: the others."""
    metrics = answer.metrics
    return UsageMetadata(
        input_tokens=metrics.prompt_tokens,
        output_tokens=metrics.new_tokens,
        total_tokens=metrics.prompt_tokens + metrics.new_tokens,
        input_token_details=InputTokenDetails(
            cache_read=metrics.reused_tokens, cache_creation=metrics.fresh_tokens
        ),
    )


def generation_info(answer: Answer, model_name: str) -> dict[str, Any]:
    """``blendrag`` holds the metrics: TTFT, reused tokens, and for each chunk what happened."""
    info = {
        "finish_reason": answer.finish_reason,
        "model_name": model_name,
        "token_usage": token_usage([answer]),
        "ttft_s": answer.metrics.ttft_s,
        "blendrag": answer.metrics.as_dict(),
    }
    if answer.logprobs is not None:
        info["logprobs"] = openai_logprobs(answer.logprobs)
    return info


def openai_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """``logprobs`` as OpenAI's chat completions write them, which is what LangChain hands on."""
    return {
        "content": [
            {
                **_logprob(place.token, place.logprob),
                "top_logprobs": [_logprob(token, value) for token, value in place.top],
            }
            for place in logprobs
        ]
    }


def _logprob(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}
