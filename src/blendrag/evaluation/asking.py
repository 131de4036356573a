"""One question asked one way, through the engine as a user asks it, and seen while it is answered.

Owns the witness: a logits processor that changes nothing and keeps the first token's logits and the
tokens chosen, which is how KL and agreement come from the very request whose time is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from blendrag.engine import BlendEngine, Options
from blendrag.errors import CorpusError
from blendrag.metrics import ChunkReport, RequestMetrics


@dataclass(frozen=True)
class Reply:
    """An answer and what it took; ``logits`` ``[V]`` of the first token, where one model call gave it."""

    text: str
    tokens: tuple[int, ...]
    logits: torch.Tensor | None
    ratio: float
    charged_ratio: float
    ttft_s: float
    policy: str = ""
    """That really chose, where it is another than asked for."""
    schedule: str = ""
    """That really ran."""


class Witness(LogitsProcessor):
    """Sees what a greedy ``generate`` of one sequence chooses from."""

    def __init__(self) -> None:
        self.logits: torch.Tensor | None = None
        self._chosen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.logits is None:
            self.logits = scores[0].clone()  # [V]
        self._chosen.append(scores[0].argmax())
        return scores

    @property
    def tokens(self) -> tuple[int, ...]:
        """The answer's, its end token included."""
        return tuple(int(token) for token in self._chosen)


def ask(engine: BlendEngine, prompt: str, options: Options, chunks: Sequence[str]) -> Reply:
    """Greedy answer to one user message that quotes ``chunks``; nothing of it runs on when this returns.

    Raises :class:`CorpusError` if KV of one of them was to be loaded and was not (idealised prefix
    caching loads the first): that would be full prefill under another name.
    """
    witness = Witness()
    watched = {**options.generate, "logits_processor": LogitsProcessorList([witness])}
    answer = engine.generate(prompt, replace(options, generate=watched))
    engine.drain()
    metrics = answer.metrics
    if options.mode == "prefix":
        _require_loaded(metrics.chunks[:1], 1, metrics.notes)
    elif options.mode != "full":
        _require_loaded(metrics.chunks, len(chunks), metrics.notes)
    computed = _computed_share(metrics, [len(engine.resources.text_ids(text)) for text in chunks])
    return Reply(
        answer.text,
        witness.tokens,
        witness.logits,
        metrics.ratio if computed is None else computed,
        metrics.charged_ratio if computed is None else computed,
        metrics.ttft_s,
        metrics.policy,
        metrics.schedule,
    )


def _require_loaded(chunks: Sequence[ChunkReport], expected: int, notes: Sequence[str]) -> None:
    missed = [chunk for chunk in chunks if chunk.outcome == "computed"]
    found = len(chunks) - len(missed)
    if missed or found != expected:
        why = missed[0].reason if missed else "; ".join(notes) or "not recognised"
        raise CorpusError(
            f"KV of {found} of a prompt's {expected} chunks was loaded ({why}); expected all of them, "
            "run again"
        )


def _computed_share(metrics: RequestMetrics, chunk_tokens: Sequence[int]) -> float | None:
    """Share of chunk tokens computed where chunks are computed whole or not at all; else ``None``."""
    if metrics.mode not in ("full", "prefix"):
        return None
    loaded = sum(chunk.tokens for chunk in metrics.chunks if chunk.outcome != "computed")
    return 1 - loaded / sum(chunk_tokens) if chunk_tokens else 0.0
