"""How good answers are: against the accepted answers, against full prefill, and how certain a mean is.

Exact match and F1 count *words* with SQuAD's normalisation, not tokens of a tokenizer. PGR (performance gap
recovered) = (score − no context) / (full − no context): 0 for answers as without context, 1 as with a full
prefill. Intervals are of a paired bootstrap over contexts: every way is resampled with the same draws, and
questions about one context are drawn together because they share its chunks.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from blendrag.errors import InvalidInputError, UnsupportedModelError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

RESAMPLES = 2000
#: Full prefill must beat no context by more than this for PGR to mean anything.
SMALLEST_GAP = 0.05
#: Share of draws on either side of the 95% interval.
TAIL = 0.025
#: A smaller lead is a rounding error.
SMALLEST_LEAD = 1e-9

# -- against the accepted answers -----------------------------------------------------------------


def normalised(text: str) -> str:
    """SQuAD's: lower case, without punctuation and articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, accepted: Iterable[str]) -> float:
    """1 if the normalised answer equals one of the accepted ones, else 0."""
    given = normalised(answer)
    return float(any(given == normalised(text) for text in accepted))


def f1(answer: str, accepted: Iterable[str]) -> float:
    """Best F1 over the accepted answers, on normalised words."""
    words = normalised(answer).split()
    return max((_f1(words, normalised(text).split()) for text in accepted), default=0.0)


def _f1(answer: Sequence[str], expected: Sequence[str]) -> float:
    if not answer or not expected:  # SQuAD 2.0: an empty answer is right if nothing is expected
        return float(list(answer) == list(expected))
    common = sum((Counter(answer) & Counter(expected)).values())
    return 2 * common / (len(answer) + len(expected))


def rouge_l(answer: str, accepted: Iterable[str]) -> float:
    """Best Rouge-L F-measure over the accepted answers, stemmed."""
    scorer = require_rouge()
    return max((scorer.score(text, answer)["rougeL"].fmeasure for text in accepted), default=0.0)


@lru_cache(maxsize=1)
def require_rouge() -> Any:
    """The scorer; raises :class:`InvalidInputError` without the package ``rouge-score``."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as exc:
        raise InvalidInputError(
            'Rouge-L needs the package rouge-score; pip install "blendrag[lab]"'
        ) from exc
    return RougeScorer(["rougeL"], use_stemmer=True)


# -- against full prefill -------------------------------------------------------------------------


def token_kl(full: torch.Tensor, other: torch.Tensor) -> float:
    """Mean of :func:`first_token_kl` over the rows of two ``[T, V]``."""
    pairs = zip(full, other, strict=True)
    return sum(first_token_kl(*pair) for pair in pairs) / len(full)


def first_token_kl(full: torch.Tensor, other: torch.Tensor) -> float:
    """KL(full ‖ other) in nats of two rows of logits ``[V]``; infinite if ``other`` excludes a token that
    ``full`` allows. Raises :class:`UnsupportedModelError` for logits that are not numbers."""
    expected = torch.log_softmax(full.double(), dim=-1)  # [V]
    given = torch.log_softmax(other.double(), dim=-1)  # [V]
    terms = expected.exp() * (expected - given)  # [V]
    excluded = expected.isneginf()  # 0 · (−∞ + ∞) counts nothing
    divergence = float(terms.masked_fill(excluded, 0.0).sum())
    if math.isnan(divergence):
        raise UnsupportedModelError(
            "the logits of an answer are not numbers, expected finite ones; load the "
            "model with --dtype float32"
        )
    return max(0.0, divergence)


def agreement(full: Sequence[int], other: Sequence[int]) -> float:
    """Share of the longer answer's tokens before the first difference."""
    longest = max(len(full), len(other))
    if not longest:
        return 1.0
    pairs = zip(full, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / longest


# -- how certain ----------------------------------------------------------------------------------

#: Number of questions and their summed score, for each context.
ByContext = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Gain:
    """PGR with its interval. ``None`` if full prefill gains nothing over no context. No interval if there
    is one context, or if full prefill gains nothing in more draws than an interval leaves out."""

    pgr: float | None
    low: float | None
    high: float | None


UNDEFINED = Gain(None, None, None)


class PairedBootstrap:
    """Draws contexts once; every way is scored on the same draws."""

    def __init__(
        self,
        full: Sequence[float],
        nothing: Sequence[float],
        contexts: Sequence[str],
        seed: int = 0,
    ) -> None:
        """``full``, ``nothing``: scores with full prefill and without context, for each question;
        ``contexts``: the context of each question."""
        if not len(full) == len(nothing) == len(contexts) > 0:
            raise InvalidInputError(
                f"{len(full)}, {len(nothing)} and {len(contexts)} scores and contexts, expected as "
                "many of each and at least one"
            )
        names, member = np.unique(np.asarray(contexts), return_inverse=True)
        self._member = member  # [Q] → context
        self._sizes = np.bincount(member, minlength=len(names)).astype(float)  # [C]
        self._draws = _weights(self._sizes, seed)  # [B, C]
        self._full, self._full_drawn = self._means(full)
        self._nothing, self._nothing_drawn = self._means(nothing)

    def gain(self, scores: Sequence[float], smallest_gap: float = SMALLEST_GAP) -> Gain:
        """PGR of one way from its score for each question."""
        gap = self._full - self._nothing
        if gap <= smallest_gap:
            return UNDEFINED
        mean, drawn = self._means(scores)
        pgr = (mean - self._nothing) / gap
        gaps = self._full_drawn - self._nothing_drawn  # [B]
        defined = gaps > smallest_gap
        if len(self._sizes) < 2 or 1 - defined.mean() > TAIL:
            return Gain(pgr, None, None)
        ratios = (drawn - self._nothing_drawn)[defined] / gaps[defined]
        low, high = np.quantile(ratios, [TAIL, 1 - TAIL])
        return Gain(pgr, float(low), float(high))

    def by_context(self, scores: Sequence[float]) -> tuple[tuple[int, float], ...]:
        """What :func:`paired_lead` compares."""
        sums = np.bincount(self._member, weights=np.asarray(scores, dtype=float))  # [C]
        return tuple((int(n), float(s)) for n, s in zip(self._sizes, sums, strict=True))

    def _means(self, scores: Sequence[float]) -> tuple[float, np.ndarray]:
        """Mean over the questions, and over those of each draw ``[B]``."""
        values = np.asarray(scores, dtype=float)  # [Q]
        if len(values) != len(self._member):
            raise InvalidInputError(
                f"{len(values)} scores for {len(self._member)} questions, expected one for each"
            )
        sums = np.bincount(self._member, weights=values)  # [C]
        return float(values.mean()), self._draws @ sums


@dataclass(frozen=True)
class Lead:
    """Difference of two mean scores, with its interval."""

    mean: float
    low: float
    high: float

    @property
    def is_certain(self) -> bool:
        """The whole interval is above 0."""
        return self.low > SMALLEST_LEAD


def paired_lead(other: ByContext, own: ByContext, seed: int = 0) -> Lead | None:
    """Lead of ``other`` over ``own`` on the same questions. What both have in common cancels, which it does
    not between two separate intervals.

    ``None`` if nothing can be said: fewer than two contexts, or other questions.
    """
    sizes = np.asarray([n for n, _ in own], dtype=float)  # [C]
    if len(sizes) < 2 or [n for n, _ in other] != [n for n, _ in own]:
        return None
    ahead = np.asarray([b - a for (_, a), (_, b) in zip(own, other, strict=True)])  # [C]
    drawn = _weights(sizes, seed) @ ahead  # [B]
    low, high = np.quantile(drawn, [TAIL, 1 - TAIL])
    return Lead(float(ahead.sum() / sizes.sum()), float(low), float(high))


def _weights(sizes: np.ndarray, seed: int) -> np.ndarray:
    """``[B, C]``: the weight of each question of a context of ``sizes`` ``[C]`` in each draw."""
    count = len(sizes)
    share = np.full(count, 1 / count)
    drawn = np.random.default_rng(seed).multinomial(count, share, size=RESAMPLES)  # [B, C]
    return np.asarray(drawn / (drawn @ sizes)[:, None])
