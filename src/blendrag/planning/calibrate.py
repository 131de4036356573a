"""Finds the policy that is closest to full prefill, and the smallest ratio that is as close as a given one:
sample, measure, choose, keep.

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
#: The best on every pretrained model measured.
CONSTANT_SCHEDULE = Schedule("constant")


class Trial(NamedTuple):
    """What is measured on a prompt."""

    policy: str
    ratio: float

    def __str__(self) -> str:
        return f"ratio {self.ratio:g}, {self.policy}"


REUSE = Trial("reuse", 0.0)


class Closeness(NamedTuple):
    """How close a blended answer is to that of a full prefill."""

    kl: float
    """Mean KL(full prefill ‖ blended) per answer token, in nats."""
    agreement: float
    """Share of the answer's tokens that the blended prompt would choose, too."""


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
    fusor: Fusor, controller: Controller, expected: Reference, trial: Trial
) -> Closeness | None:
    """How close the blended answer is to that of the full prefill; ``None`` if there is no chunk to blend.

    The blended prompt is made to give the same answer (teacher forcing). The caller holds the lock. Raises
    :class:`SpanCorruptError`.
    """
    prompt, adapter = expected.prompt, fusor.adapter
    blending = Blending(make_policy(trial.policy), CONSTANT_SCHEDULE, trial.ratio)
    plan = controller.plan(prompt, "blend", blending)
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
    agrees = rows.argmax(-1) == torch.tensor(expected.answer)
    kl = divergence(expected.log_probs, rows.log_softmax(-1))
    return Closeness(kl, float(agrees.float().mean()))


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
CANDIDATES = ("query+shift(33-67)", "query+shift(0-100)", "query", "query+hkvd", "hkvd", "blend")
#: Candidates left from these parts of the calibration on. The last one is checked on the remaining prompts.
ROUNDS = ((1 / 8, 2), (3 / 8, 1))
#: The fewest prompts of a check, and of a whole calibration.
MIN_CHECK_PROMPTS = 4
MIN_PROMPTS = 7
#: Smaller ratios that are compared with the given one. Only their last candidate is measured.
SMALLER_RATIOS = (0.05, 0.15)

Row = Mapping[Trial, Closeness]


@dataclass
class Race:
    """Deviations of each prompt measured so far: of nothing recomputed, of the default, and of the candidates
    that are left, the best first once some were dropped."""

    ratio: float
    """The largest ratio. Candidates are compared at it."""
    prompts: int = 0
    """Prompts that there are to measure."""
    candidates: list[str] = field(default_factory=lambda: list(CANDIDATES))
    rows: list[Row] = field(default_factory=list)
    chosen_by: int = 0
    """Prompts on which the candidates left were chosen; the later ones check the first of them."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """Above 0, ascending."""
        return (*(ratio for ratio in SMALLER_RATIOS if ratio < self.ratio), self.ratio)

    @property
    def trials(self) -> tuple[Trial, ...]:
        """What the next prompt is measured with."""
        ratios = self.ratios if len(self.candidates) == 1 else (self.ratio,)
        policies = DEFAULT_POLICY, *self.candidates
        return (REUSE, *(Trial(policy, ratio) for ratio in ratios for policy in policies))

    def narrow(self, done: float) -> None:
        """Drop the worst candidates, if it is time: ``done`` is the part of the calibration that is over."""
        left = min((left for part, left in ROUNDS if done >= part), default=len(CANDIDATES))
        if self.rows and left < len(self.candidates):
            self.candidates = sorted(
                self.candidates, key=lambda policy: self.kl(Trial(policy, self.ratio))
            )[:left]
            self.chosen_by = len(self.rows)

    def kl(self, trial: Trial) -> float:
        """Mean over the prompts that were measured with it."""
        return statistics.fmean(row[trial].kl for row in self.rows if trial in row)

    def result(self) -> tuple[Calibration, ...]:
        """One for each ratio, ascending; empty if too few prompts were measured."""
        check = self.rows[self.chosen_by :]
        if not self.chosen_by or len(check) < MIN_CHECK_PROMPTS:
            return ()
        default, own = DEFAULT_POLICY, self.candidates[0]
        # an early end may have measured smaller ratios on none of them, or on the last ones
        ratios = (r for r in self.ratios if all(Trial(own, r) in row for row in check))
        *smaller, largest = (Calibration.of(default, own, ratio, check) for ratio in ratios)
        nothing = Calibration.of(REUSE.policy, REUSE.policy, REUSE.ratio, check)
        found = [each.compared(largest, check) for each in (nothing, *smaller, largest)]
        chosen = next(each for each in found if each.is_as_close)
        return tuple(replace(each, is_chosen=each is chosen) for each in found)


# -- what was found, kept in the store ---------------------------------------------------------------

#: A difference counts if it is more than this many standard errors.
MIN_STANDARD_ERRORS = 2
#: A smaller ratio may lose this share of the tokens that the largest one agrees on.
MAX_LOST_AGREEMENT = 0.01
#: Its KL may be higher by this share, however few prompts there were to tell the two apart.
MAX_LOST_KL = 0.5


@dataclass(frozen=True)
class Calibration:
    """The policy for a model's requests at one ratio that name none. KL is in nats per answer token."""

    policy: str
    """The candidate that gained, else the default."""
    default: str
    """The policy of requests without a calibration, then; records that do not name it are not used."""
    candidate: str
    """The policy that was closest to full prefill on the first prompts, and was checked on the others."""
    ratio: Annotated[float, Field(ge=0, lt=1)]
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
    agreement: float | None = None
    """Share of the answer's tokens that ``policy`` would choose, too."""
    loss: float = 0.0
    """How much farther ``policy`` is than the policy of the largest ratio."""
    loss_error: float = 0.0
    """Standard error of ``loss``, paired by prompt."""
    lost_agreement: float = 0.0
    is_chosen: bool = False
    """Whether requests that name neither policy nor ratio take this ratio."""

    def __post_init__(self) -> None:
        make_policy(self.policy)  # raises for a policy that no request could use

    @property
    def trial(self) -> Trial:
        return Trial(self.policy, self.ratio)

    @property
    def kl(self) -> float:
        """That of ``policy``."""
        return self.candidate_kl if self.policy == self.candidate else self.default_kl

    @property
    def gains(self) -> bool:
        return self.gain > MIN_STANDARD_ERRORS * self.gain_error

    @property
    def is_as_close(self) -> bool:
        """Whether this ratio is as close to full prefill as the largest one."""
        largest_kl = self.kl - self.loss
        allowed = min(MIN_STANDARD_ERRORS * self.loss_error, MAX_LOST_KL * largest_kl)
        return self.loss <= allowed and self.lost_agreement <= MAX_LOST_AGREEMENT

    @classmethod
    def of(cls, default: str, candidate: str, ratio: float, rows: Sequence[Row]) -> Calibration:
        """From the deviations on each prompt of the check, of which there are two or more."""
        own, other, reuse = (
            [row[trial].kl for row in rows]
            for trial in (Trial(candidate, ratio), Trial(default, ratio), REUSE)
        )
        own_kl, other_kl, reuse_kl = map(statistics.fmean, (own, other, reuse))
        gain, error = _difference(other, own)
        kls = own_kl, other_kl, reuse_kl
        found = cls(default, default, candidate, ratio, len(rows), *kls, gain, error)
        return replace(found, policy=candidate) if found.gains else found

    def compared(self, largest: Calibration, rows: Sequence[Row]) -> Calibration:
        """This one with what it loses against the ``largest`` ratio."""
        own, other = ([row[each.trial] for row in rows] for each in (self, largest))
        loss, error = _difference([one.kl for one in own], [one.kl for one in other])
        agreement, most = (statistics.fmean(one.agreement for one in each) for each in (own, other))
        return replace(
            self, agreement=agreement, loss=loss, loss_error=error, lost_agreement=most - agreement
        )


def _difference(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The mean of ``one - other``, paired, and its standard error."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences), error


def calibrations(root: Path, namespace: str) -> Records[Calibration]:
    """What was found for ``namespace``: one entry for each ratio, which the next calibration replaces."""
    return Records(root, f"{namespace}.schedules", "calibrations", Calibration, ())


@dataclass(frozen=True)
class PartialRace:
    """A race that ended before its last prompt."""

    digest: str
    """Tells its prompts, ratio and candidates from others: only the same race goes on."""
    prompts_done: int
    """Prompts that were tried; some may have given no row."""
    candidates: tuple[str, ...]
    chosen_by: int
    rows: tuple[tuple[tuple[Trial, Closeness], ...], ...]

    @classmethod
    def of(cls, digest: str, race: Race, prompts_done: int) -> PartialRace:
        rows = tuple(tuple(row.items()) for row in race.rows)
        return cls(digest, prompts_done, tuple(race.candidates), race.chosen_by, rows)

    def fits(self, race: Race) -> bool:
        """Whether a new ``race`` can go on from here; not if this one is damaged."""
        if not self.candidates or not {*self.candidates} <= {*race.candidates}:
            return False
        policies = DEFAULT_POLICY, *self.candidates
        needed = {REUSE, *(Trial(policy, race.ratio) for policy in policies)}
        counts_fit = 0 <= self.chosen_by <= len(self.rows) <= self.prompts_done
        return counts_fit and all(needed <= {trial for trial, _ in row} for row in self.rows)

    def resume(self, race: Race) -> None:
        """Bring a new ``race`` to where this one ended."""
        race.candidates, race.chosen_by = list(self.candidates), self.chosen_by
        race.rows = [dict(row) for row in self.rows]


def partial_races(root: Path, namespace: str) -> Records[PartialRace]:
    """The last race of ``namespace`` that was not run to its end, if any."""
    return Records(root, f"{namespace}.races", "races", PartialRace, ("digest",))


def policy_at(found: Sequence[Calibration], ratio: float) -> str:
    """The policy that was ``found`` for requests at ``ratio``, else the default. At 0 none chooses tokens, so
    that of ratio 0 is not for ``auto``, which may begin there and recompute more."""
    at = (each.policy for each in found if each.ratio and math.isclose(each.ratio, ratio))
    return next(at, DEFAULT_POLICY)
