"""One question asked one way, through the engine as a user asks it, and seen while it is answered.

Owns the witness: a logits processor that keeps the logits and the tokens chosen, which is how KL and
agreement come from the very request whose time is measured. It changes nothing, unless it is to make the
model say a given answer (teacher forcing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from blendrag.engine import BlendEngine, Options
from blendrag.engine.request import RagPrompt
from blendrag.errors import CorpusError
from blendrag.metrics import ChunkReport, RequestMetrics
from blendrag.text.chunking import canonical, chunk_id_of
from blendrag.text.matches import Match

#: Answer tokens whose distributions are compared.
FIDELITY_TOKENS = 32


@dataclass(frozen=True)
class Reply:
    """An answer and what it took; ``logits`` ``[T, V]`` of its first :data:`FIDELITY_TOKENS` tokens, where
    one model call gave it."""

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

    def __init__(self, forced: Sequence[int] = ()) -> None:
        """``forced``: tokens that are chosen whatever the model prefers; those after them are its own."""
        self._forced = tuple(forced)
        self._rows: list[torch.Tensor] = []
        self._chosen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        step = len(self._chosen)
        if step < FIDELITY_TOKENS:
            self._rows.append(scores[0].clone())  # [V]
        self._chosen.append(scores[0].argmax())
        if step >= len(self._forced):
            return scores
        only = torch.full_like(scores, -torch.inf)
        only[:, self._forced[step]] = 0.0
        return only  # type: ignore[return-value]

    @property
    def logits(self) -> torch.Tensor | None:
        """``[T, V]``; ``None`` before the first token."""
        return torch.stack(self._rows) if self._rows else None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The answer's, its end token included."""
        return tuple(int(token) for token in self._chosen)


def ask(
    engine: BlendEngine,
    prompt: str,
    options: Options,
    chunks: Sequence[str],
    forced: Sequence[int] = (),
) -> Reply:
    """Greedy answer to one user message that quotes ``chunks``; nothing of it runs on when this returns.

    ``forced`` is the answer it is made to give; ``tokens`` are those it would have chosen.

    Raises :class:`CorpusError` if KV of one of them was to be loaded and was not (idealised prefix
    caching loads the first): that would be full prefill under another name.
    """
    witness = Witness(forced)
    watched = {**options.generate, "logits_processor": LogitsProcessorList([witness])}
    answer = engine.generate(_quoting(prompt, chunks), replace(options, generate=watched))
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


def _quoting(prompt: str, chunks: Sequence[str]) -> RagPrompt:
    """The prompt, with the places of its chunks."""
    matches, at = [], 0
    for chunk in map(canonical, chunks):
        start = prompt.index(chunk, at)
        at = start + len(chunk)
        matches.append(Match(chunk_id_of(chunk), start, at, complete=True))
    return RagPrompt(prompt, tuple(matches), (at, len(prompt)))


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
