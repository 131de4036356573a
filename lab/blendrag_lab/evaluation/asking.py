"""One question asked in one way, through the engine as a user asks it.

A logits processor and a forward hook observe the request whose time is measured and change nothing. One
forward over the KV of its prompt then gives the distributions of a given answer (teacher forcing).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import Cache, LogitsProcessor, LogitsProcessorList

from blendrag.demo import demo_model_path
from blendrag.engine import BlendEngine, Options, rendering
from blendrag.engine.rendering import SEPARATOR, render
from blendrag.engine.request import Prompt, RagPrompt, SchemaPrompt
from blendrag.errors import CorpusError
from blendrag.metrics import RequestMetrics
from blendrag.model.adapter import ModelAdapter
from blendrag.model.tokens import Tokens
from blendrag.text.chunking import canonical, chunk_id_of
from blendrag.text.matches import Match
from blendrag_lab.evaluation.datasets import Case, Metric, spread
from blendrag_lab.synthetic.samples import CONTEXT, NATIVE, QUESTION

#: Answer tokens whose distributions are compared.
FIDELITY_TOKENS = 32


@dataclass(frozen=True)
class Wording:
    """A user message with holes for context and question. Chunks are separated by blank lines, exactly
    as they were ingested, so that the engine recognises them."""

    template: str

    @classmethod
    def of(cls, prompt_template: str) -> Wording:
        """That of the option ``prompt_template``."""
        template = prompt_template.replace(rendering.CONTEXT, CONTEXT)
        return cls(template.replace(rendering.QUESTION, QUESTION))

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


def prompt_of(case: Case, chunks: Sequence[str], wording: Wording, tokens: Tokens) -> Prompt:
    """The question with ``chunks``: one user message, or the messages of a chat. A chat is one message too if
    the model has no chat template."""
    turns = [*case.history, (case.question, "")]
    said: list[tuple[str, str]] = []
    for part, (question, answer) in zip(spread(chunks, len(turns)), turns, strict=True):
        said += [("user", wording.prompt(part, question)), ("assistant", answer)]
    if case.history and tokens.has_template:
        return [{"role": role, "content": text} for role, text in said[:-1]]
    return quoting(SEPARATOR.join(text for _, text in said[:-1]), chunks)


@dataclass(frozen=True)
class ObservedAnswer:
    text: str
    tokens: tuple[int, ...]
    logits: torch.Tensor
    """``[T, V]`` of the answer that is compared."""
    ratio: float
    charged_ratio: float
    ttft_s: float
    policy: str = ""
    schedule: str = ""


class Witness(LogitsProcessor):
    """Keeps what a greedy ``generate`` of one sequence chooses, and the KV cache of its prompt."""

    def __init__(self) -> None:
        self._chosen: list[torch.Tensor] = []
        self._first = torch.empty(0)
        self._cache: Cache | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._chosen.append(scores[0].argmax())
        return scores

    def see(self, model: nn.Module, args: Any, output: Any) -> None:
        """The forward hook. The last forward before the first token is the prompt's. Layers are copied, not
        their KV: a layer only appends to it."""
        if not self._chosen:
            self._first = output.logits[:, -1].float()  # [1, V]
            self._cache = copy.copy(output.past_key_values)
            self._cache.layers = [copy.copy(layer) for layer in self._cache.layers]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the answer, with the end token."""
        return tuple(int(token) for token in self._chosen)

    @torch.inference_mode()
    def logits(self, adapter: ModelAdapter, answer: Sequence[int]) -> torch.Tensor:
        """``[T, V]`` of the tokens of ``answer``: one forward of them over the prompt's KV. Once only."""
        if len(answer) < 2:
            return self._first
        ids = torch.tensor([answer[:-1]], device=adapter.device)
        with adapter.lock:
            made = adapter.model(input_ids=ids, past_key_values=self._cache, use_cache=True).logits
        return torch.cat([self._first, made[0].float()])


def ask(
    engine: BlendEngine,
    prompt: Prompt,
    options: Options,
    chunks: Sequence[str],
    answer: Sequence[int] = (),
) -> ObservedAnswer:
    """Greedy answer to a prompt that quotes ``chunks``; background work is done when this returns.

    The logits are of the first :data:`FIDELITY_TOKENS` tokens of ``answer`` (teacher forcing), by default of
    the answer that was given.

    Raises :class:`CorpusError` if KV that should have been loaded was not: that would be full prefill
    under another name. Idealised prefix caching loads the first chunk only.
    """
    witness, adapter = Witness(), engine.adapter
    watched = {**options.generate_kwargs, "logits_processor": LogitsProcessorList([witness])}
    hook = adapter.model.register_forward_hook(witness.see)
    try:
        given = engine.generate(prompt, replace(options, generate_kwargs=watched))
    finally:
        hook.remove()
    engine.drain()
    metrics = given.metrics
    expected = {"full": 0, "prefix": 1}.get(str(options.mode), len(chunks))
    if expected and isinstance(prompt, SchemaPrompt):  # text outside of modules may be loaded, too
        expected = max(expected, len(metrics.chunks))
    _require_loaded(metrics, expected)
    ratio, charged = metrics.ratio, metrics.charged_ratio
    if options.mode in ("full", "prefix"):  # a chunk is either loaded or computed
        tokens = sum(len(engine.tokens.encode_text(text)) for text in chunks)
        loaded = sum(chunk.tokens for chunk in metrics.chunks if chunk.outcome != "computed")
        ratio = charged = 1 - loaded / tokens if tokens else 0.0
    return ObservedAnswer(
        text=given.text,
        tokens=witness.tokens,
        logits=witness.logits(adapter, (answer or witness.tokens)[:FIDELITY_TOKENS]),
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
