"""Finds the policy that is closest to full prefill at a given ratio: sample, measure, choose, keep.

The deviation of a policy is the KL divergence of blended answers from those of a full prefill.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from transformers import DynamicCache

from blendrag.config import DEFAULT_POLICY
from blendrag.corpus.corpus import Corpus
from blendrag.errors import InvalidInputError
from blendrag.fusor import Fusor
from blendrag.fusor.selection import Blending, Schedule, make_policy
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.controller import Controller
from blendrag.store.records import Records
from blendrag.text.chunking import Chunk
from blendrag.text.prompt import SegmentedPrompt

# -- sample: questions over chunks of the user's corpus -------------------------------------------

#: Chunks of a document taken together: one and those before it, to which it may refer.
RUN_CHUNKS = 3
#: Longest subject of a question.
SUBJECT_CHARS = 60
_PUNCTUATION = re.compile(r"[^\w\s'-]+")


class SampledQuestion(NamedTuple):
    """A question and the texts of the chunks before it, in the prompt's order."""

    question: str
    chunks: tuple[str, ...]


def sample_corpus(corpus: Corpus, prompts: int, top_k: int) -> Iterator[SampledQuestion]:
    """At most ``prompts`` random sets of at most ``top_k`` chunks, and a question about one of them.

    Chunks come with their neighbours: blending can lose what chunks say about each other. Each text is asked
    about once, because prompts that check a policy must not have chosen it; a small corpus gives fewer.
    """
    sources = corpus.sources()
    if not sources:
        raise InvalidInputError(
            "the corpus holds no document to calibrate on; ingest first (blendrag ingest PATH…)"
        )
    rng = random.Random("calibrate")
    for first, last in islice(
        _chunks_to_ask_about(corpus, rng.sample(sources, len(sources)), rng), prompts
    ):
        runs = [_run(corpus.chunks_of(first), last, top_k)]
        question = question_about(runs[0][-1])
        for source in rng.sample(sources, min(len(sources), top_k)):
            left = top_k - sum(map(len, runs))
            chunks = corpus.chunks_of(source) if left > 0 and source != first else []
            if chunks:
                runs.append(_run(chunks, rng.randrange(len(chunks)), left))
        rng.shuffle(runs)
        yield SampledQuestion(question, tuple(text for run in runs for text in run))


def _chunks_to_ask_about(
    corpus: Corpus, sources: Sequence[str], rng: random.Random
) -> Iterator[tuple[str, int]]:
    """Source and index of random chunks, one of each document in turn, until every text was taken once."""
    taken: set[str] = set()
    while sources:
        left = []
        for source in sources:
            texts = [chunk.text for chunk in corpus.chunks_of(source)]
            if new := [i for i, text in enumerate(texts) if text not in taken]:
                at = rng.choice(new)
                taken.add(texts[at])
                left.append(source)
                yield source, at
        sources = left


def sample_questions(questions: Sequence[str], prompts: int) -> list[str]:
    """At most ``prompts`` of ``questions``, drawn at random, each once."""
    distinct = list(dict.fromkeys(question.strip() for question in questions if question.strip()))
    if not distinct:
        raise InvalidInputError("there is no question to calibrate on; expected one a line")
    return random.Random("calibrate").sample(distinct, min(prompts, len(distinct)))


def question_about(text: str) -> str:
    """A question that ``text`` answers: about its longest name, else about its first words."""
    names = [
        " ".join(words)
        for part in _PUNCTUATION.split(text)
        for is_name, words in groupby(part.split(), key=lambda word: word[0].isupper())
        if is_name
    ]
    subject = max(names, key=len, default=" ".join(text.split()))[:SUBJECT_CHARS].strip()
    return f"What does the context say about {subject}?"


def _run(chunks: Sequence[Chunk], last: int, at_most: int) -> list[str]:
    """A chunk of a document and those before it."""
    return [chunk.text for chunk in chunks[: last + 1][-min(RUN_CHUNKS, at_most) :]]


# -- measure: deviation from full prefill ---------------------------------------------------------

#: Answer tokens compared. Policies differ little in the first ones.
ANSWER_TOKENS = 16
#: The largest deviation: means and errors stay finite.
MAX_KL = 1e3
REUSE = "reuse"
#: The best on every pretrained model measured.
CONSTANT_SCHEDULE = Schedule("constant")


@dataclass(frozen=True)
class Reference:
    """What full prefill answers to a prompt; on the CPU."""

    prompt: SegmentedPrompt
    answer: tuple[int, ...]
    """Its greedy continuation."""
    log_probs: torch.Tensor
    """``[T, V]`` float32, of the distributions those tokens were taken from."""


@torch.inference_mode()
def reference(adapter: ModelAdapter, prompt: SegmentedPrompt) -> Reference:
    """Full prefill and greedy decoding of ``prompt``. The caller holds the lock."""
    eos = adapter.model.generation_config.eos_token_id
    ends = {*eos} if isinstance(eos, list | tuple) else {eos}
    cache, ids = DynamicCache(), prompt.ids
    answer: list[int] = []
    rows = []
    while len(answer) < ANSWER_TOKENS and not ends.intersection(answer):
        rows.append(_logits(adapter, ids, cache, 1))  # [1, V]
        answer.append(int(rows[-1].argmax()))
        ids = tuple(answer[-1:])
    return Reference(prompt, tuple(answer), torch.cat(rows).log_softmax(-1))


@torch.inference_mode()
def deviation(
    fusor: Fusor,
    controller: Controller,
    expected: Reference,
    policy: str,
    ratio: float,
) -> float | None:
    """Mean KL(full prefill ‖ blended) per answer token, in nats; ``None`` if there is no chunk to blend.

    The blended prompt is made to give the same answer (teacher forcing). The caller holds the lock. Raises
    :class:`SpanCorruptError`.
    """
    prompt, adapter = expected.prompt, fusor.adapter
    plan = controller.plan(prompt, "blend", Blending(make_policy(policy), CONSTANT_SCHEDULE, ratio))
    try:
        request = plan.request(len(prompt.ids))
        if not request.candidates:
            return None
        ids = torch.tensor([prompt.ids], device=adapter.device)
        logits, cache, _ = fusor.prefill(ids, request, new_tokens=len(expected.answer))
    finally:
        plan.close()
    rows = logits[0].float().cpu()  # [1, V]
    if said := expected.answer[:-1]:
        rows = torch.cat((rows, _logits(adapter, said, cache, len(said))))  # [T, V]
    return divergence(expected.log_probs, rows.log_softmax(-1))


def divergence(full: torch.Tensor, blended: torch.Tensor) -> float:
    """Mean KL of ``[T, V]`` log probabilities, in nats per token; :data:`MAX_KL` if it is not a number."""
    parts = full.exp() * (full - blended)
    parts = parts.masked_fill(full == -math.inf, 0.0)  # 0 · log 0 counts as 0
    mean = float(parts.sum(-1).mean())
    return min(max(0.0, mean), MAX_KL) if math.isfinite(mean) else MAX_KL


def _logits(adapter: ModelAdapter, ids: Sequence[int], cache: Any, keep: int) -> torch.Tensor:
    """``[keep, V]`` float32 on the CPU."""
    given = torch.tensor([ids], device=adapter.device)
    out = adapter.model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=keep)
    return out.logits[0].float().cpu()


# -- choose: drop candidates early, check the last on prompts that did not choose it ----------------

#: Policies that come close to full prefill on some pretrained model, besides the default. Falling schedules
#: do on none.
CANDIDATES = ("query+shift", "query(33-67)", "query(0-100)", "query+hkvd", "hkvd", "blend")
#: Candidates left from these parts of the calibration on. The last one is checked on the remaining prompts.
ROUNDS = ((1 / 8, 2), (3 / 8, 1))
#: The fewest prompts of a check.
MIN_CHECK_PROMPTS = 4


@dataclass
class Race:
    """KL of each prompt measured so far, by policy: the default, nothing recomputed, and the candidates
    that are left, the best first once some were dropped."""

    candidates: list[str] = field(default_factory=lambda: list(CANDIDATES))
    kls: list[dict[str, float]] = field(default_factory=list)
    chosen_by: int = 0
    """Prompts on which the candidates left were chosen; the later ones check the first of them."""

    @property
    def policies(self) -> tuple[str, ...]:
        """What the next prompt is measured with."""
        return (REUSE, DEFAULT_POLICY, *self.candidates)

    def narrow(self, done: float) -> None:
        """Drop the worst candidates, if it is time: ``done`` is the part of the calibration that is over."""
        left = min((left for part, left in ROUNDS if done >= part), default=len(CANDIDATES))
        if self.kls and left < len(self.candidates):
            self.candidates = sorted(self.candidates, key=self.kl)[:left]
            self.chosen_by = len(self.kls)

    def kl(self, policy: str) -> float:
        """Mean over the prompts."""
        return statistics.fmean(prompt[policy] for prompt in self.kls)

    def result(self, ratio: float) -> Calibration | None:
        """``None`` if too few prompts were measured."""
        check = self.kls[self.chosen_by :]
        if not self.chosen_by or len(check) < MIN_CHECK_PROMPTS:
            return None
        return Calibration.of(DEFAULT_POLICY, self.candidates[0], ratio, check)


# -- what was found, kept in the store ---------------------------------------------------------------

#: A gain counts if it is more than this many standard errors.
MIN_STANDARD_ERRORS = 2


@dataclass(frozen=True)
class Calibration:
    """The policy for a model's requests that name none. KL is in nats per answer token."""

    policy: str
    """The candidate that gained, else the default."""
    candidate: str
    """The policy that was closest to full prefill on the first prompts, and was checked on the others."""
    ratio: Annotated[float, Field(gt=0, lt=1)]
    prompts: int
    """Prompts of the check. The following are means over them."""
    candidate_kl: float
    default_kl: float
    reuse_kl: float
    """With nothing recomputed."""
    gain: float
    """How much closer the candidate is than the default."""
    gain_error: float
    """Standard error of ``gain``, paired by prompt."""

    def __post_init__(self) -> None:
        make_policy(self.policy)  # raises for a policy that no request could use

    @property
    def gains(self) -> bool:
        return self.gain > MIN_STANDARD_ERRORS * self.gain_error

    @classmethod
    def of(
        cls, default: str, candidate: str, ratio: float, kls: Sequence[Mapping[str, float]]
    ) -> Calibration:
        """From the KL of each policy on each prompt of the check, of which there are two or more."""
        own, other, reuse = (
            [prompt[name] for prompt in kls] for name in (candidate, default, REUSE)
        )
        gains = [worse - better for worse, better in zip(other, own, strict=True)]
        own_kl, other_kl, reuse_kl, gain = map(statistics.fmean, (own, other, reuse, gains))
        error = statistics.stdev(gains) / math.sqrt(len(gains))
        found = cls(default, candidate, ratio, len(gains), own_kl, other_kl, reuse_kl, gain, error)
        return replace(found, policy=candidate) if found.gains else found


def calibrations(root: Path, namespace: str) -> Records[Calibration]:
    """What was found for ``namespace``: one entry, which the next calibration replaces."""
    return Records(root, f"{namespace}.schedules", "calibrations", Calibration, ())
