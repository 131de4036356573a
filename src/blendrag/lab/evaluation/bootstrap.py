"""PGR, and how sure it is: paired bootstrap over the contexts of the questions.

PGR = (score − no context) / (full − no context): 0 answers as if there were no context, 1 as a full
prefill does. Every way is resampled with the same draws (*paired*), so that equal answers have equal
intervals and what is common to all questions cancels. Questions about one context share its chunks
and are drawn together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blendrag.errors import InvalidInputError

RESAMPLES = 2000
#: Full prefill must beat no context by more than this for the ratio to mean anything.
SMALLEST_GAP = 0.05
#: Share of draws on either side of the 95% interval.
TAIL = 0.025


@dataclass(frozen=True)
class Gain:
    """PGR with its interval. ``None`` where full prefill gains nothing over no context; without interval
    where there is one context only, or where that happens in more draws than an interval leaves out."""

    pgr: float | None
    low: float | None
    high: float | None


UNDEFINED = Gain(None, None, None)


#: Questions and their summed score, of each context that has any.
ByContext = Sequence[Sequence[float]]


class PairedBootstrap:
    """Draws contexts once; every way is then seen through the same draws."""

    def __init__(
        self,
        full: Sequence[float],
        nothing: Sequence[float],
        contexts: Sequence[str],
        seed: int = 0,
        resamples: int = RESAMPLES,
    ) -> None:
        """``full`` and ``nothing``: scores with full prefill and without context, by question;
        ``contexts`` names each question's."""
        if not len(full) == len(nothing) == len(contexts) > 0:
            raise InvalidInputError(
                f"{len(full)}, {len(nothing)} and {len(contexts)} scores and contexts, expected as "
                "many of each and at least one"
            )
        names, member = np.unique(np.asarray(contexts), return_inverse=True)
        self._member = member  # [Q] → context
        self._sizes = np.bincount(member, minlength=len(names)).astype(float)  # [C]
        self._draws = _weights(self._sizes, seed, resamples)  # [B, C]
        self._full, self._full_drawn = self._means(full)
        self._nothing, self._nothing_drawn = self._means(nothing)

    def gain(self, scores: Sequence[float], smallest_gap: float = SMALLEST_GAP) -> Gain:
        """PGR of one way, its scores in the order of the questions."""
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
        """Questions and their summed score, of each context: what :func:`paired_lead` compares."""
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
    """By how much one mean score is above another, with its interval."""

    mean: float
    low: float
    high: float


def paired_lead(
    other: ByContext, own: ByContext, seed: int = 0, resamples: int = RESAMPLES
) -> Lead | None:
    """Of ``other`` over ``own``, which answered the same questions: what both have in common cancels,
    as it does not where two intervals are laid side by side.

    ``None`` where nothing can be said: fewer than two contexts, or other questions.
    """
    sizes = np.asarray([n for n, _ in own], dtype=float)  # [C]
    if len(sizes) < 2 or [n for n, _ in other] != [n for n, _ in own]:
        return None
    ahead = np.asarray([b - a for (_, a), (_, b) in zip(own, other, strict=True)])  # [C]
    drawn = _weights(sizes, seed, resamples) @ ahead  # [B]
    low, high = np.quantile(drawn, [TAIL, 1 - TAIL])
    return Lead(float(ahead.sum() / sizes.sum()), float(low), float(high))


def _weights(sizes: np.ndarray, seed: int, resamples: int) -> np.ndarray:
    """``[B, C]``: what each question of a context of ``sizes`` ``[C]`` weighs in each draw."""
    count = len(sizes)
    drawn = np.random.default_rng(seed).multinomial(
        count, np.full(count, 1 / count), size=resamples
    )  # [B, C]
    return np.asarray(drawn / (drawn @ sizes)[:, None])
