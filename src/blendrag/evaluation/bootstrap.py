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
#: Of the interval.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Gain:
    """PGR with its interval; ``None`` where full prefill gains nothing over no context."""

    pgr: float | None
    low: float | None
    high: float | None


UNDEFINED = Gain(None, None, None)


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
        self._sizes = np.bincount(member).astype(float)  # [C]
        drawn = np.random.default_rng(seed).multinomial(
            len(names), np.full(len(names), 1 / len(names)), size=resamples
        )  # [B, C]
        self._draws = drawn / (drawn @ self._sizes)[:, None]  # [B, C]: weight of each question
        self._full, self._full_drawn = self._means(full)
        self._nothing, self._nothing_drawn = self._means(nothing)

    def gain(self, scores: Sequence[float]) -> Gain:
        """PGR of one way, its scores in the order of the questions."""
        gap = self._full - self._nothing
        if gap <= SMALLEST_GAP:
            return UNDEFINED
        mean, drawn = self._means(scores)
        gaps = self._full_drawn - self._nothing_drawn  # [B]
        defined = gaps > SMALLEST_GAP
        if not defined.any():
            return Gain((mean - self._nothing) / gap, None, None)
        ratios = (drawn - self._nothing_drawn)[defined] / gaps[defined]
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(ratios, [tail, 1 - tail])
        return Gain((mean - self._nothing) / gap, float(low), float(high))

    def _means(self, scores: Sequence[float]) -> tuple[float, np.ndarray]:
        """Mean over the questions, and over those of each draw ``[B]``."""
        values = np.asarray(scores, dtype=float)  # [Q]
        if len(values) != len(self._member):
            raise InvalidInputError(
                f"{len(values)} scores for {len(self._member)} questions, expected one for each"
            )
        sums = np.bincount(self._member, weights=values)  # [C]
        return float(values.mean()), self._draws @ sums
