"""What LangChain's caches and traces are told about a wrapper, and how it counts tokens."""

from __future__ import annotations

from typing import Any

from blendrag.frameworks.fields import RequestFields


def identifying_params(fields: RequestFields) -> dict[str, Any]:
    """All that decides an answer: the key of LangChain's LLM caches."""
    engine = fields.engine
    options, defaults = fields.request_options(), engine.settings
    return {
        "model_name": engine.resources.model_name,
        "store": str(engine.resources.root),
        "mode": options.mode or defaults.mode,
        "policy": options.policy or defaults.policy,
        "schedule": options.schedule or defaults.schedule,
        "ratio": defaults.ratio if options.ratio is None else options.ratio,
        "min_ratio": defaults.min_ratio if options.min_ratio is None else options.min_ratio,
        "max_tokens": options.max_new_tokens or defaults.max_new_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.seed,
        "stop": list(options.stop),
        "logprobs": options.logprobs,
        "apply_chat_template": options.apply_chat_template,
        "template_kwargs": dict(options.template),
        "generate_kwargs": dict(options.generate),
    }
