"""What the spans of a request hold (:mod:`blendrag.tracing`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from blendrag.config import Settings
from blendrag.engine.request import Answer, Options
from blendrag.metrics import RequestMetrics
from blendrag.planning.plan import Plan
from blendrag.tracing import PROVIDER, Add, span


def asked(kind: str, options: Options, model: str, defaults: Settings) -> dict[str, Any]:
    """Attributes of a request's span: what was asked for."""
    sequences = options.generate_kwargs.get("num_return_sequences", 1)
    return {
        **PROVIDER,
        "gen_ai.operation.name": kind,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": options.max_new_tokens or defaults.max_new_tokens,
        "gen_ai.request.temperature": options.temperature,
        "gen_ai.request.top_p": options.top_p,
        "gen_ai.request.seed": options.seed,
        "gen_ai.request.stop_sequences": options.stop or None,
        "gen_ai.request.choice.count": sequences if sequences != 1 else None,
    }


def answered(answer: Answer, model: str) -> dict[str, Any]:
    """Attributes of a request's span: how it was answered."""
    m = answer.metrics
    return {
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [answer.finish_reason] * len(answer.texts),
        "gen_ai.response.time_to_first_chunk": m.ttft_s,
        "gen_ai.usage.input_tokens": m.prompt_tokens,
        "gen_ai.usage.output_tokens": m.new_tokens,
        "gen_ai.usage.cache_read.input_tokens": m.reused_tokens,
        "blendrag.mode": m.mode,
        "blendrag.policy": m.policy or None,
        "blendrag.ratio": m.ratio,
    }


def retrieval(root: Path, top_k: int) -> AbstractContextManager[Add]:
    """The span of a search in the store at ``root``."""
    return span(
        f"retrieval {root}",
        lambda: {
            **PROVIDER,
            "gen_ai.operation.name": "retrieval",
            "gen_ai.data_source.id": str(root),
            "gen_ai.retrieval.top_k": top_k,
        },
    )


def planned(plan: Plan) -> dict[str, Any]:
    return {
        "blendrag.tokens.prompt": len(plan.prompt.ids),
        "blendrag.tokens.reused": plan.reused_tokens,
        "blendrag.chunks": len(plan.chunks),
    }


def prefilled(metrics: RequestMetrics) -> dict[str, Any]:
    return {
        "blendrag.tokens.reused": metrics.reused_tokens,
        "blendrag.tokens.recomputed": metrics.recomputed_tokens,
        "blendrag.tokens.fresh": metrics.fresh_tokens,
        "blendrag.batch_size": metrics.batch_size,
    }


def decoded(metrics: RequestMetrics) -> dict[str, Any]:
    return {"gen_ai.usage.output_tokens": metrics.new_tokens}
