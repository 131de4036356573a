"""The instrumentation event that reports KV reuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events import BaseEvent

if TYPE_CHECKING:
    from blendrag.engine import Answer

dispatcher = get_dispatcher(__name__)


class BlendReuseEvent(BaseEvent):
    """Emitted for every answer of a :class:`BlendLLM`, in the span of its call.

    Tokens and seconds are those of :class:`blendrag.metrics.RequestMetrics`.
    """

    model_name: str
    mode: str
    ttft_s: float
    prompt_tokens: int
    reused_tokens: int
    """Prompt tokens whose stored KV was loaded."""
    recomputed_tokens: int
    fresh_tokens: int
    new_tokens: int
    chunks: list[dict[str, Any]]
    """For each chunk found in the prompt: id, source, tokens, outcome and reason."""
    notes: list[str]
    """Why nothing was reused, and what was changed or refused."""

    @classmethod
    def class_name(cls) -> str:
        return "BlendReuseEvent"

    @property
    def reused_share(self) -> float:
        """Reused share of the prompt's tokens, in [0, 1]."""
        return self.reused_tokens / self.prompt_tokens


def emit_reuse(answer: Answer, model_name: str, span_id: str | None) -> None:
    """Emit the event of ``answer`` in the span in which its call began."""
    metrics = answer.metrics.as_dict()
    fields = BlendReuseEvent.model_fields.keys() & metrics.keys()
    known = {name: metrics[name] for name in fields}
    dispatcher.event(
        BlendReuseEvent(
            model_name=model_name,
            span_id=span_id,
            **{**known, "chunks": list(metrics["chunks"]), "notes": list(metrics["notes"])},
        )
    )
