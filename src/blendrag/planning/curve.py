"""Seconds of one layer over rows, or of a whole prefill over tokens: monotone, and as measured.

``base(rows) + pair_s · rows · context + placed_s · placed``. The attention's share grows with the keys
a row sees (``context``, the mean over rows) and is linear; everything else, the matrix products before all,
is a broken line through what was measured: flat where few rows cost what many do, as on a GPU.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from blendrag.errors import InvalidInputError

#: The column of rows times context among a fit's terms.
PAIRS = 2


class Point(NamedTuple):
    """One measurement: ``rows`` that see ``context`` keys on average, ``placed`` loaded tokens moved."""

    rows: float
    context: float
    placed: float
    seconds: float


@dataclass(frozen=True)
class Curve:
    """See the module. ``rows`` ascend, ``seconds`` do not fall; neither is empty."""

    rows: tuple[float, ...]
    seconds: tuple[float, ...]
    row_s: float
    """Of one more row beyond the last that was measured."""
    pair_s: float = 0.0
    placed_s: float = 0.0

    def __post_init__(self) -> None:
        numbers = (*self.rows, *self.seconds, self.row_s, self.pair_s, self.placed_s)
        rising = all(a < b for a, b in pairwise(self.rows))
        falling = any(a > b for a, b in pairwise(self.seconds))
        whole = bool(self.rows) and len(self.rows) == len(self.seconds)
        if not whole or not rising or falling or not all(0 <= x < float("inf") for x in numbers):
            raise InvalidInputError(
                f"a curve through {len(self.rows)} row counts and {len(self.seconds)} times, expected as "
                "many of both, finite, rows rising and times not falling; measure again"
            )

    def base(self, rows: float) -> float:
        """Everything but attention and moving keys. Rows below the first measured cost what that does."""
        at = bisect_right(self.rows, rows)
        if at == 0:
            return self.seconds[0]
        if at == len(self.rows):
            return self.seconds[-1] + self.row_s * (rows - self.rows[-1])
        part = (rows - self.rows[at - 1]) / (self.rows[at] - self.rows[at - 1])
        return self.seconds[at - 1] + part * (self.seconds[at] - self.seconds[at - 1])

    def __call__(self, rows: float, context: float, placed: float = 0.0) -> float:
        """Seconds; without rows there is only the moving."""
        moved = self.placed_s * placed
        return moved + (self.base(rows) + self.pair_s * rows * context if rows > 0 else 0.0)


def fit(points: Iterable[Point], pair_s: float | None = None) -> Curve:
    """The curve through ``points``: none of its terms negative, errors weighed relative to the time.

    Least squares give the linear terms, ``pair_s`` too unless it is known; what they leave is made monotone
    over the rows (isotonic regression) and kept as the broken line. Points of one row count alone are taken
    for proportional to it. Raises :class:`InvalidInputError` without points.
    """
    import numpy as np
    from scipy.optimize import isotonic_regression, nnls

    known = [p for p in points if p.seconds > 0 and p.rows > 0]
    if not known:
        raise InvalidInputError("no time was measured, expected one at least; measure again")
    terms = np.array([[1.0, p.rows, p.rows * p.context, p.placed] for p in known])
    seconds = np.array([p.seconds for p in known])
    scale = np.maximum(terms.max(axis=0), 1e-12)
    target = np.ones(len(known))
    if pair_s is not None:  # no more of it than leaves half of every time to the rows
        pair_s = min(pair_s, float((seconds / 2 / np.maximum(terms[:, PAIRS], 1e-12)).min()))
        target -= pair_s * terms[:, PAIRS] / seconds
        terms[:, PAIRS] = 0.0
    found, _ = nnls(terms / scale / seconds[:, None], target)
    _, row_s, own_pair_s, placed_s = (float(x) for x in found / scale)
    pair_s = own_pair_s if pair_s is None else pair_s
    rows = sorted({p.rows for p in known})
    left = [_mean_left([p for p in known if p.rows == r], pair_s, placed_s) for r in rows]
    smooth = np.maximum(isotonic_regression(left).x, 1e-9)
    if len(rows) == 1:
        row_s = float(smooth[0]) / rows[0]
    return Curve(tuple(rows), tuple(float(x) for x in smooth), row_s, pair_s, placed_s)


def _mean_left(points: Sequence[Point], pair_s: float, placed_s: float) -> float:
    left = [p.seconds - pair_s * p.rows * p.context - placed_s * p.placed for p in points]
    return sum(left) / len(left)
