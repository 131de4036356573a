"""How good answers are: against the accepted answers, against full prefill, and how certain a mean is.

Exact match and F1 count *words* with SQuAD's normalisation, not tokens of a tokenizer. PGR (performance gap
recovered) = (score − no context) / (full − no context): 0 for answers as without context, 1 as with a full
prefill. Intervals are of a paired bootstrap over contexts: every way is resampled with the same draws, and
questions about one context are drawn together because they share its chunks.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from blendrag.errors import UnsupportedModelError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

RESAMPLES = 2000
#: Full prefill must beat no context by more than this for PGR to mean anything.
SMALLEST_GAP = 0.05
#: Share of draws on either side of the 95% interval.
TAIL = 0.025
#: A question is answered right from this score on: the answer, or half of the words of F1.
RIGHT = 0.5
#: A smaller lead is a rounding error.
SMALLEST_LEAD = 1e-9


def normalised(text: str) -> str:
    """SQuAD's: lower case, without punctuation and articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, accepted: Iterable[str]) -> float:
    """1 if the normalised answer equals one of the accepted ones, else 0."""
    given = normalised(answer)
    return float(any(given == normalised(text) for text in accepted))


def f1(answer: str, accepted: Iterable[str]) -> float:
    """Best F1 over the accepted answers, on normalised words."""
    words, scores = normalised(answer).split(), [0.0]
    for expected in (normalised(text).split() for text in accepted):
        common = sum((Counter(words) & Counter(expected)).values())
        # SQuAD 2.0: an empty answer is right if nothing is expected.
        either = len(words) + len(expected)
        scores.append(2 * common / either if either else 1.0)
    return max(scores)


def rouge_l(answer: str, accepted: Iterable[str]) -> float:
    """Best Rouge-L F-measure over the accepted answers, stemmed."""
    scores = (_rouge().score(text, answer)["rougeL"].fmeasure for text in accepted)
    return max(scores, default=0.0)


@lru_cache(maxsize=1)
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)


def token_kl(full: torch.Tensor, other: torch.Tensor) -> list[float]:
    """KL(full ‖ other) in nats of each row of two logits ``[T, V]``; infinite if ``other`` excludes a token
    that ``full`` allows. Raises :class:`UnsupportedModelError` for logits that are not numbers."""
    expected = torch.log_softmax(full.double(), dim=-1)  # [T, V]
    given = torch.log_softmax(other.double(), dim=-1)  # [T, V]
    terms = expected.exp() * (expected - given)  # [T, V]
    excluded = expected.isneginf()  # 0 · (−∞ + ∞) counts nothing
    divergence = terms.masked_fill(excluded, 0.0).sum(dim=-1)  # [T]
    if divergence.isnan().any():
        raise UnsupportedModelError(
            "the logits of an answer are not numbers, expected finite ones; load the "
            "model with --dtype float32"
        )
    return divergence.clamp_min(0.0).tolist()


#: Number of questions and their summed score, for each context.
ByContext = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval, if there is one."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def is_above_zero(self) -> bool:
        """The whole interval is above 0."""
        return self.low is not None and self.low > SMALLEST_LEAD


def sum_by_context(scores: Iterable[tuple[str, float]]) -> ByContext:
    """From (context, score) of each question."""
    found: dict[str, list[float]] = {}
    for context, score in scores:
        found.setdefault(context, []).append(score)
    return tuple((len(of), sum(of)) for _, of in sorted(found.items()))


def performance_gap_recovered(
    own: ByContext,
    full: ByContext,
    nothing: ByContext,
    seed: int = 0,
    smallest_gap: float = SMALLEST_GAP,
) -> Estimate:
    """PGR from the scores of one way, of full prefill and without context.

    No value if full prefill gains nothing, or one of them has no scores. No interval if there is one
    context, or if full prefill gains nothing in more draws than an interval leaves out.
    """
    if not (own and full and nothing):
        return Estimate(None)
    (mean, drawn), (top, top_drawn), (bottom, bottom_drawn) = (
        _means(scores, seed) for scores in (own, full, nothing)
    )
    if top - bottom <= smallest_gap:
        return Estimate(None)
    pgr = (mean - bottom) / (top - bottom)
    gaps = top_drawn - bottom_drawn  # [B]
    defined = gaps > smallest_gap
    if len(own) < 2 or 1 - defined.mean() > TAIL:
        return Estimate(pgr)
    return _with_interval(pgr, (drawn - bottom_drawn)[defined] / gaps[defined])


def loss_recovered(own: ByContext, reuse: ByContext, seed: int, smallest: float) -> Estimate:
    """1 − own / reuse, of losses that full prefill does not have: PGR with reuse in place of no context.

    No value if one of them is empty, or that of reuse is ``smallest`` or less.
    """
    if not own or not reuse:
        return Estimate(None)
    gain, nothing = ([(n, -loss) for n, loss in losses] for losses in (own, reuse))
    return performance_gap_recovered(gain, [(n, 0.0) for n, _ in own], nothing, seed, smallest)


def paired_lead(other: ByContext, own: ByContext, seed: int = 0) -> Estimate:
    """Lead of ``other`` over ``own`` on the same questions. What both have in common cancels, which it does
    not between two separate intervals.

    No value for fewer than two contexts, or other questions.
    """
    if len(own) < 2 or [n for n, _ in other] != [n for n, _ in own]:
        return Estimate(None)
    ahead = [(n, b - a) for (_, b), (n, a) in zip(other, own, strict=True)]
    return _with_interval(*_means(ahead, seed))


@dataclass(frozen=True)
class Kept:
    """What became of the questions that full prefill answers right, and of the others."""

    right: int = 0
    """Questions that full prefill answers right."""
    kept: float | None = None
    """Share of them that the way answers right, too."""
    gained: float | None = None
    """Share of the others that it answers right."""


def answers_kept(own: ByContext, full: ByContext) -> Kept:
    """From the scores of one way and of full prefill for the same contexts.

    A context of several questions, whose scores are 0 or 1, counts only if full prefill answers all of
    them right or none: else its sums do not tell which ones the way answers. Without scores of the way
    only ``right`` is known.
    """
    asked = {True: 0.0, False: 0.0}
    answered = {True: 0.0, False: 0.0}
    for (n, best), (_, score) in zip(full, own or full, strict=True):
        if n == 1 or best in (0, n):
            is_right = best >= RIGHT * n
            asked[is_right] += n
            answered[is_right] += float(score >= RIGHT) if n == 1 else score
    shares = {
        is_right: answered[is_right] / n if n and own else None for is_right, n in asked.items()
    }
    return Kept(round(asked[True]), shares[True], shares[False])


def _with_interval(value: float, drawn: np.ndarray) -> Estimate:
    low, high = np.quantile(drawn, [TAIL, 1 - TAIL])
    return Estimate(value, float(low), float(high))


def _means(scores: ByContext, seed: int) -> tuple[float, np.ndarray]:
    """Mean over the questions, and over those of each draw ``[B]``."""
    sums = np.asarray([s for _, s in scores])  # [C]
    sizes = tuple(n for n, _ in scores)
    return float(sums.sum() / sum(sizes)), _weights(sizes, seed) @ sums


@lru_cache(maxsize=8)
def _weights(sizes: tuple[float, ...], seed: int) -> np.ndarray:
    """``[B, C]``: the weight of each question of a context of ``sizes`` in each draw."""
    count = len(sizes)
    share = np.full(count, 1 / count)
    drawn = np.random.default_rng(seed).multinomial(count, share, size=RESAMPLES)  # [B, C]
    return np.asarray(drawn / (drawn @ np.asarray(sizes, dtype=float))[:, None])
