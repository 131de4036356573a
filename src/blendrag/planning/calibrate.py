"""Finds the schedule with the smallest deviation at a given ratio: sampled prompts, measure, search.

The deviation of a schedule is the KL divergence of blended answers from those of a full prefill.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from blendrag.corpus.corpus import Corpus
from blendrag.errors import InvalidInputError
from blendrag.fusor import Fusor
from blendrag.fusor.selection import Schedule, SelectionPolicy
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.controller import Controller, PlanOptions
from blendrag.text.prompt import SegmentedPrompt

# -- sample: questions over chunks of the user's corpus -------------------------------------------

#: Chunks of a document taken together: one and those before it, to which it may refer.
RUN = 3
#: Longest sentence that is used as a question.
QUESTION_CHARS = 200
_SENTENCE = re.compile(r".+?[.!?](?=\s|$)", re.DOTALL)


class SampledQuestion(NamedTuple):
    """A question and the texts of the chunks before it, in the prompt's order."""

    question: str
    chunks: tuple[str, ...]


def sample_corpus(corpus: Corpus, prompts: int, top_k: int, seed: int) -> Iterator[SampledQuestion]:
    """``prompts`` random sets of at most ``top_k`` chunks; a chunk's first sentence is used as its question.

    Chunks come with their neighbours: blending can lose what chunks say about each other.
    """
    sources = corpus.sources()
    if not sources:
        raise InvalidInputError(
            "the corpus holds no document to calibrate on; ingest first (blendrag ingest PATH…)"
        )
    rng = random.Random(f"calibrate/{seed}")
    order = rng.sample(sources, len(sources))
    for number in range(prompts):
        first = order[number % len(order)]
        runs = [_run(corpus, first, top_k, rng)]
        question = first_sentence(runs[0][-1])
        for source in rng.sample(sources, min(len(sources), top_k)):
            left = top_k - sum(map(len, runs))
            if left > 0 and source != first:
                runs.append(_run(corpus, source, left, rng))
        rng.shuffle(runs)
        yield SampledQuestion(question, tuple(text for run in runs for text in run))


def sample_questions(questions: Sequence[str], prompts: int, seed: int) -> list[str]:
    """At most ``prompts`` of ``questions``, drawn at random."""
    asked = [question for question in questions if question.strip()]
    if not asked:
        raise InvalidInputError("there is no question to calibrate on; expected one a line")
    return random.Random(f"calibrate/{seed}").sample(asked, min(prompts, len(asked)))


def first_sentence(text: str) -> str:
    """Of ``text``, at most :data:`QUESTION_CHARS` characters."""
    found = _SENTENCE.match(text.strip())
    return " ".join((found[0] if found else text).split())[:QUESTION_CHARS]


def _run(corpus: Corpus, source: str, at_most: int, rng: random.Random) -> list[str]:
    """A random chunk of a document and those before it."""
    chunks = corpus.chunks_of(source)
    last = rng.randrange(len(chunks))
    return [chunk.text for chunk in chunks[: last + 1][-min(RUN, at_most) :]]


# -- measure: deviation from full prefill ---------------------------------------------------------

#: Answer tokens compared.
ANSWER_TOKENS = 8
#: ``measure(schedule, bound)``: mean deviation, or infinity once it is certain to exceed ``bound``.
Deviates = Callable[[Schedule, float], float]


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
    policy: SelectionPolicy,
    schedule: Schedule,
    ratio: float,
) -> float | None:
    """Mean KL(full prefill ‖ blended) per answer token, in nats; ``None`` if there is no chunk to blend.

    The blended prompt is made to give the same answer (teacher forcing). The caller holds the lock. Raises
    :class:`SpanCorruptError`.
    """
    prompt, adapter = expected.prompt, fusor.adapter
    plan = controller.plan(prompt, PlanOptions("blend", policy, lambda _: schedule, ratio))
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
    """Mean KL of ``[T, V]`` log probabilities, in nats per token; infinity if it is not a number."""
    parts = full.exp() * (full - blended)
    parts = parts.masked_fill(full == -math.inf, 0.0)  # 0 · log 0 counts as 0
    mean = float(parts.sum(-1).mean())
    return math.inf if math.isnan(mean) else max(0.0, mean)


def _logits(adapter: ModelAdapter, ids: Sequence[int], cache: Any, keep: int) -> torch.Tensor:
    """``[keep, V]`` float32 on the CPU."""
    given = torch.tensor([ids], device=adapter.device)
    out = adapter.model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=keep)
    return out.logits[0].float().cpu()


def mean_deviation(of: Callable[[int, Schedule], float], prompts: int) -> Deviates:
    """Mean deviation of a schedule over the same prompts; ``of(i, schedule)`` is that of prompt ``i``.

    Prompts that deviated most in the last whole measurement come first: they show soonest that the mean is
    certain to exceed the bound.
    """
    order = list(range(prompts))

    def mean(schedule: Schedule, bound: float) -> float:
        seen: dict[int, float] = {}
        for i in order:
            seen[i] = of(i, schedule)
            if sum(seen.values()) > bound * prompts:
                return math.inf
        order.sort(key=lambda i: -seen[i])
        return math.fsum(seen.values()) / prompts

    return mean


GROWTHS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.25)
#: Layers after which a family or a move may stop spending.
STOPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80)
#: Parts of the whole mass that a move gives to a vertex, largest first.
PARTS = (0.5, 0.2, 0.08, 0.03)
#: A move counts if it saves at least this share of the deviation.
WORTHWHILE = 2e-3
MAX_ROUNDS = 6


class Tried(NamedTuple):
    schedule: Schedule
    deviation: float


@dataclass
class Found:
    """Result of a search, also while it runs; ``best`` is never worse than any of ``families``."""

    best: Tried
    families: list[Tried] = field(default_factory=list)
    tried: int = 0
    interrupted: bool = False
    out_of_time: bool = False

    @property
    def family(self) -> Tried:
        """The best of the fixed families."""
        return min(self.families, key=lambda each: each.deviation)


def families(layers: int, ratio: float) -> list[Schedule]:
    """The fixed shapes a search begins with: constant, linear, geometric, first:m.

    Without those that are the same at this ratio, because shares are capped at 1.
    """
    names = ["constant", "linear", *(f"geometric:{g:g}" for g in GROWTHS)]
    names += [f"first:{m}" for m in STOPS if m < layers - 1]
    by_shares: dict[tuple[float, ...], Schedule] = {}
    for schedule in map(Schedule.parse, names):
        shares = tuple(round(share, 9) for share in schedule.shares(ratio, layers))
        by_shares.setdefault(shares, schedule)
    return list(by_shares.values())


def search(
    measure: Deviates,
    layers: int,
    ratio: float,
    seed: int = 0,
    has_time: Callable[[], bool] = lambda: True,
    watch: Callable[[Found], None] = lambda found: None,
    known: Schedule | None = None,
) -> Found:
    """The best schedule for a model of ``layers`` at ``ratio``, the same for the same arguments.

    Every non-increasing vector is a mixture of the vertices ``first:1`` … ``first:L-1``. Starting from
    ``known``, an earlier result, or the best fixed family, moves shift mass to or from a vertex at the same
    ratio. Ends early when ``has_time()`` says so or at ``KeyboardInterrupt``, with the best so far; before
    the first family is measured the interrupt is raised, and ``watch`` is not called.
    """
    found, rng = Found(Tried(Schedule("constant"), math.inf)), random.Random(seed)

    def attempt(schedule: Schedule, bound: float = math.inf, is_family: bool = False) -> bool:
        """Measure ``schedule``; whether it stays below ``bound``."""
        tried = Tried(schedule, measure(schedule, bound))
        found.tried += 1
        if found.tried == 1 or tried.deviation < found.best.deviation:
            found.best = tried
        if is_family:  # after the best: an interrupt between the two leaves the best never worse
            found.families.append(tried)
        if found.families:
            watch(found)
        return tried.deviation < bound

    def is_over() -> bool:
        found.out_of_time = bool(found.families) and not has_time()
        return found.out_of_time

    try:
        if known is not None:
            attempt(known)
        for schedule in families(layers, ratio):
            if is_over():
                return found
            attempt(schedule, is_family=True)
        for _ in range(MAX_ROUNDS):
            improved = False
            for stop, part in _shuffled_moves(layers - 1, rng):
                if is_over():
                    return found
                shares = _moved(found.best.schedule.shares(ratio, layers), stop, part, ratio)
                if shares is not None:
                    bound = (1 - WORTHWHILE) * found.best.deviation
                    improved |= attempt(Schedule("vector", shares), bound)
            if not improved:
                break
    except KeyboardInterrupt:
        if not found.families:
            raise
        found.interrupted = True
    return found


def _shuffled_moves(n: int, rng: random.Random) -> Iterator[tuple[int, float]]:
    """Moves ``(stop, part)``: give vertex ``first:stop`` that part of the whole mass, or if negative, take
    that part of the vertex's mass. Large steps first, each size in random order."""
    if n < 2:
        return
    stops = [*(m for m in STOPS if m < n), n]
    for part in PARTS:
        moves = [(m, part) for m in stops]
        moves += [(m, -2 * part) for m in stops]  # -1: all of it
        rng.shuffle(moves)
        yield from moves


def _moved(
    shares: Sequence[float], stop: int, part: float, ratio: float
) -> tuple[float, ...] | None:
    """``shares`` after a move, with the same mean; ``None`` if it is impossible or changes nothing."""
    n = len(shares)
    total = ratio * n
    vertex = [total / stop if i < stop else 0.0 for i in range(n)]
    if part < 0:
        below = shares[stop] if stop < n else 0.0
        own = (shares[stop - 1] - below) * stop / total  # the vertex's part of the mass
        if own < 1e-3 or own > 1 - 1e-3:
            return None
        taken = -part * own
        part = -taken / (1 - taken)
    mixed = tuple((1 - part) * s + part * v for s, v in zip(shares, vertex, strict=True))
    if mixed[0] > 1.0 or max(abs(a - b) for a, b in zip(mixed, shares, strict=True)) < 1e-6:
        return None
    return tuple(max(0.0, share) for share in mixed)
