"""How the recompute ratio r is spread over layers 1…L-1 (CacheBlend §4.3 asks for r1 > r2 > …).

A schedule becomes L-1 shares in [0, 1], non-increasing because selected sets are nested, with mean exactly r.
On pretrained models of 18 to 30 layers ``constant`` is best for ``query``: a token that later layers drop
leaves them fresh and stale KV in the same prompt.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from blendrag.config import of_variable
from blendrag.errors import InvalidInputError, InvalidOptionError
from blendrag.wording import quoted

DEFAULT_GROWTH = 0.8
#: Most weights of a vector; no model has so many layers.
MAX_WEIGHTS = 10_000
#: m of ``first:m``.
_POSITIVE = re.compile(r"0{0,9}[1-9][0-9]{0,8}", re.ASCII)
#: Weights smaller than this, relative to the first, count as 0.
NEGLIGIBLE = 1e-12
#: A weight may exceed the one before by this share of it, for rounding.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Schedule:
    """A named family (``constant``, ``linear``, ``geometric[:g]``, ``first:m``) or a vector of weights.

    ``first:m`` spends r evenly on layers 1…m and nothing later.
    """

    name: str
    weights: tuple[float, ...] = ()
    growth: float = DEFAULT_GROWTH
    first: int = 0

    @classmethod
    def parse(cls, text: str | Sequence[float]) -> Schedule:
        """``"geometric:0.6"``, ``"first:4"``, ``"0.4,0.2,0.1"``, … or a sequence of weights.

        Raises :class:`InvalidInputError`, also for weights that rise."""
        if not isinstance(text, str):
            return cls("vector", _weights(text, text))
        name, _, argument = text.strip().partition(":")
        if name in ("constant", "linear") and not argument:
            return cls(name)
        if name == "geometric":
            growth = _number(argument, text) if argument else DEFAULT_GROWTH
            if not 0.0 < growth <= 1.0:
                raise _wrong(text, ": the growth must lie in (0, 1]")
            return cls(name, growth=growth)
        if name == "first":
            if not _POSITIVE.fullmatch(argument):
                raise _wrong(text, ": expected first:m, m layers, 1 or more")
            return cls(name, first=int(argument))
        if "," in text:
            parts = text.split(",", MAX_WEIGHTS)
            if len(parts) > MAX_WEIGHTS:
                raise _wrong(text, f" has more than {MAX_WEIGHTS} weights, expected one a layer")
            return cls("vector", _weights([_number(part, text) for part in parts], text))
        families = "constant, linear, geometric[:g], first:m and comma-separated weights"
        raise _wrong(text, f" is not one of {families} for layers 1…L-1")

    def __str__(self) -> str:
        if self.name == "geometric":
            return f"geometric:{self.growth:g}"
        if self.name == "first":
            return f"first:{self.first}"
        return ",".join(f"{w:g}" for w in self.weights) or self.name

    def shares(self, ratio: float, layers: int) -> list[float]:
        """Shares of layers 1…``layers``-1, non-increasing, each in [0, 1], with mean ``ratio``."""
        if not 0.0 <= ratio <= 1.0:
            raise InvalidInputError(f"ratio {ratio} is outside [0, 1]")
        n = layers - 1
        return _capped(self._shape(n), ratio) if n > 0 else []

    def counts(self, ratio: float, layers: int, candidates: int) -> list[int]:
        """Tokens per layer 1…``layers``-1, non-increasing; they sum to round(r · candidates · (layers - 1)).

        Rounding is carried from layer to layer, so that the mean over layers is r to within one token in all.
        """
        counts: list[int] = []
        exact = 0.0
        for share in self.shares(ratio, layers):
            exact += share * candidates
            counts.append(max(0, round(exact) - sum(counts)))
        for i in range(1, len(counts)):  # carrying may lift a count one above its predecessor
            surplus = max(0, counts[i] - counts[i - 1])
            counts[i] -= surplus
            for j in range(len(counts)):  # the earliest layers with room take it
                taken = min(surplus, (candidates if j == 0 else counts[j - 1]) - counts[j])
                counts[j] += taken
                surplus -= taken
                if not surplus:
                    break
        return counts

    def _shape(self, n: int) -> list[float]:
        """``n`` weights, before scaling to the ratio."""
        if self.name == "constant":
            return [1.0] * n
        if self.name == "linear":  # 1.5r → 0.5r
            return [1.5 - i / max(n - 1, 1) for i in range(n)]
        if self.name == "geometric":
            return [self.growth**i for i in range(n)]
        if self.name == "first":
            return [float(i < self.first) for i in range(n)]
        if len(self.weights) != n:
            named = f"schedule vector{of_variable('schedule', self)}"
            raise InvalidInputError(
                f"{named} has {len(self.weights)} entries, this model needs {n} "
                "(one for each layer but the first)"
            )
        return list(self.weights)


def _capped(shape: list[float], ratio: float) -> list[float]:
    """``shape`` scaled to mean ``ratio`` with every entry ≤ 1; what the cap takes goes to later entries."""
    n = len(shape)
    for i in range(1, n):  # entries that rise by rounding
        shape[i] = min(shape[i], shape[i - 1])
    # Weights that vanish next to the first would overflow the scale.
    shape = [weight if weight > NEGLIGIBLE * shape[0] else 0.0 for weight in shape]
    for capped in range(n):
        left, rest = ratio * n - capped, sum(shape[capped:])
        if rest <= 0.0:  # the weights end before the budget does
            return [1.0] * capped + [left / (n - capped)] * (n - capped)
        scale = left / rest
        if shape[capped] * scale <= 1.0 + 1e-12:
            return [1.0] * capped + [min(1.0, w * scale) for w in shape[capped:]]
    return [1.0] * n


def _weights(values: Sequence[float], text: object) -> tuple[float, ...]:
    if not values or not all(math.isfinite(v) and v >= 0 for v in values) or max(values) <= 0:
        raise _wrong(text, ": weights must be 0 or more, and not all 0")
    for layer, (before, weight) in enumerate(pairwise(values), 2):
        if weight > before * (1 + ROUNDING):
            named = f"vector{of_variable('schedule', text)}"
            raise InvalidOptionError(
                "schedule",
                f"{named} rises from {before:g} to {weight:g} at layer {layer}, expected no "
                "weight above the one before: a token left out of a layer cannot come back later; lower "
                "it, or raise those before",
            )
    return tuple(float(v) for v in values)


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError as exc:
        raise _wrong(whole, f": {quoted(text, 40)} is not a number") from exc


def _wrong(text: object, why: str) -> InvalidOptionError:
    return InvalidOptionError("schedule", f"{quoted(text)}{of_variable('schedule', text)}{why}")
