"""One question asked in one way, through the engine as a user asks it.

A logits processor observes the answer, so that KL and agreement are of the same request whose time is
measured. It changes nothing, unless it forces a given answer (teacher forcing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from blendrag.demo import demo_model_path
from blendrag.engine import BlendEngine, Options
from blendrag.engine.rendering import SEPARATOR, render
from blendrag.engine.request import RagPrompt
from blendrag.errors import CorpusError
from blendrag.lab.evaluation.datasets import Metric
from blendrag.lab.training.samples import CONTEXT, NATIVE, QUESTION
from blendrag.metrics import RequestMetrics
from blendrag.model.tokens import Tokens
from blendrag.text.chunking import canonical, chunk_id_of
from blendrag.text.matches import Match

#: Answer tokens whose distributions are compared.
FIDELITY_TOKENS = 32


@dataclass(frozen=True)
class Wording:
    """A user message with holes for context and question. Chunks are separated by blank lines, exactly
    as they were ingested, so that the engine recognises them."""

    template: str

    def prompt(self, chunks: Sequence[str], question: str) -> str:
        """The message; ``chunks`` may be empty."""
        template = self.template
        if not chunks:
            template = template.replace(CONTEXT + SEPARATOR, "").replace(CONTEXT, "")
        filled = template.replace(QUESTION, question.strip())
        return filled.replace(CONTEXT, SEPARATOR.join(chunk.strip() for chunk in chunks)).strip()

    def head(self, tokens: Tokens) -> str:
        """The rendered text before the first chunk of any prompt."""
        return render(self.template, tokens, Options()).text.split(CONTEXT)[0]


DEMO = Wording(NATIVE.messages[0][1])
SHORT_ANSWER = Wording(
    "Answer the question from the passages. Answer with the answer alone, in a few words.\n\n"
    f"{CONTEXT}{SEPARATOR}Question: {QUESTION}\nAnswer:",
)
SUMMARY = Wording(
    f"Summarise what follows, as the examples do where there are any.\n\n{CONTEXT}{SEPARATOR}"
    f"{QUESTION}\nSummary:",
)


def wording_for(tokenizer: Any, metric: Metric) -> Wording:
    """What the demo model was trained on, for models with its chat template; else plain instructions."""
    demo = (demo_model_path() / "chat_template.jinja").read_text(encoding="utf-8")
    if getattr(tokenizer, "chat_template", None) == demo:
        return DEMO
    return SUMMARY if metric == "rouge_l" else SHORT_ANSWER


@dataclass(frozen=True)
class ObservedAnswer:
    """An answer and what it cost."""

    text: str
    tokens: tuple[int, ...]
    logits: torch.Tensor | None
    """``[T, V]`` of the first :data:`FIDELITY_TOKENS` tokens; ``None`` if several prompts gave the answer."""
    ratio: float
    charged_ratio: float
    ttft_s: float
    policy: str = ""
    schedule: str = ""


class Witness(LogitsProcessor):
    """Keeps the logits and tokens of a greedy ``generate`` of one sequence."""

    def __init__(self, forced: Sequence[int]) -> None:
        """``forced``: tokens that are chosen whatever the model prefers."""
        self._forced = forced
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
    def logits(self) -> torch.Tensor:
        """``[T, V]``"""
        return torch.stack(self._rows)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that the model preferred, with the end token."""
        return tuple(int(token) for token in self._chosen)


def ask(
    engine: BlendEngine,
    prompt: str,
    options: Options,
    chunks: Sequence[str],
    forced: Sequence[int] = (),
) -> ObservedAnswer:
    """Greedy answer to one user message that quotes ``chunks``; background work is done when this returns.

    ``forced`` is the answer that the model must give; ``tokens`` are those it would have chosen.

    Raises :class:`CorpusError` if KV that should have been loaded was not: that would be full prefill
    under another name. Idealised prefix caching loads the first chunk only.
    """
    witness = Witness(forced)
    watched = {**options.generate, "logits_processor": LogitsProcessorList([witness])}
    answer = engine.generate(quoting(prompt, chunks), replace(options, generate=watched))
    engine.drain()
    metrics = answer.metrics
    _require_loaded(metrics, {"full": 0, "prefix": 1}.get(str(options.mode), len(chunks)))
    ratio, charged = metrics.ratio, metrics.charged_ratio
    if options.mode in ("full", "prefix"):  # a chunk is either loaded or computed
        tokens = sum(len(engine.resources.text_ids(text)) for text in chunks)
        loaded = sum(chunk.tokens for chunk in metrics.chunks if chunk.outcome != "computed")
        ratio = charged = 1 - loaded / tokens if tokens else 0.0
    return ObservedAnswer(
        text=answer.text,
        tokens=witness.tokens,
        logits=witness.logits,
        ratio=ratio,
        charged_ratio=charged,
        ttft_s=metrics.ttft_s,
        policy=metrics.policy,
        schedule=metrics.schedule,
    )


def _require_loaded(metrics: RequestMetrics, expected: int) -> None:
    """The first ``expected`` chunks."""
    missed = [chunk for chunk in metrics.chunks[:expected] if chunk.outcome == "computed"]
    found = len(metrics.chunks[:expected]) - len(missed)
    if found != expected:
        why = missed[0].reason if missed else "; ".join(metrics.notes) or "not recognised"
        raise CorpusError(
            f"KV of {found} of a prompt's {expected} chunks was loaded ({why}); expected all of them, "
            "run again"
        )


def quoting(prompt: str, chunks: Sequence[str]) -> RagPrompt:
    """The prompt with the positions of its chunks."""
    matches, at = [], 0
    for chunk in map(canonical, chunks):
        start = prompt.index(chunk, at)
        at = start + len(chunk)
        matches.append(Match(chunk_id_of(chunk), start, at, complete=True))
    return RagPrompt(prompt, tuple(matches), (at, len(prompt)))
