"""How the recompute ratio r is spread over layers 1…L-1.

A schedule is a vector of L-1 shares, none above 1, none above the one before (selected sets are
nested; weights that rise are refused), with mean exactly r. The paper asks for r1 > r2 > …; which
shape is best is a matter of the model and is measured, not assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from blendrag.errors import InvalidInputError

DEFAULT_GROWTH = 0.8
CALIBRATED = "calibrated"
#: Weights smaller than this, relative to the first, count as 0.
NEGLIGIBLE = 1e-12
#: A weight may exceed the one before by this share of it: rounding, not a shape.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Schedule:
    """A named family (``constant``, ``linear``, ``geometric[:g]``, ``first:m``) or a vector of weights.

    ``first:m`` spends r evenly on layers 1…m and nothing later: a model that resolves references early
    needs no more. ``calibrated`` stands for the vector found for this model and is replaced by it
    before a request runs; it carries that vector then.
    """

    name: str
    weights: tuple[float, ...] = ()
    growth: float = DEFAULT_GROWTH
    first: int = 0

    @classmethod
    def parse(cls, text: str | Sequence[float]) -> Schedule:
        """``"geometric:0.6"``, ``"first:4"``, ``"0.4,0.2,0.1"``, … or a sequence of weights.

        Raises :class:`InvalidInputError` for a name nobody knows and for weights that rise."""
        if not isinstance(text, str):
            return cls("vector", _weights(list(text), repr(text)))
        name, _, argument = text.strip().partition(":")
        if name in ("constant", "linear") and not argument:
            return cls(name)
        if name == "geometric":
            growth = _number(argument, text) if argument else DEFAULT_GROWTH
            if not 0.0 < growth <= 1.0:
                raise InvalidInputError(f"schedule {text!r}: the growth must lie in (0, 1]")
            return cls(name, growth=growth)
        if name == "first":
            if not (argument.isdecimal() and int(argument) > 0):
                raise InvalidInputError(f"schedule {text!r}: expected first:m, m layers, 1 or more")
            return cls(name, first=int(argument))
        if name == CALIBRATED:
            return cls(name, _vector(argument, text) if argument else ())
        if "," in text:
            return cls("vector", _vector(text, text))
        raise InvalidInputError(
            f"schedule {text!r} is not constant, linear, geometric[:g], first:m, calibrated or "
            "comma-separated weights for layers 1…L-1"
        )

    @property
    def is_open(self) -> bool:
        """Whether it only says ``calibrated``, and not yet what that is."""
        return self.name == CALIBRATED and not self.weights

    def __str__(self) -> str:
        if self.name == "geometric":
            return f"geometric:{self.growth:g}"
        if self.name == "first":
            return f"first:{self.first}"
        vector = ",".join(f"{w:g}" for w in self.weights)
        if self.name == CALIBRATED:
            return f"{CALIBRATED}:{vector}" if vector else CALIBRATED
        return vector or self.name

    def shares(self, ratio: float, layers: int) -> list[float]:
        """Shares of layers 1…``layers``-1, non-increasing, each in [0, 1], mean exactly ``ratio``."""
        if not 0.0 <= ratio <= 1.0:
            raise InvalidInputError(f"ratio {ratio} is outside [0, 1]")
        n = layers - 1
        if n <= 0:
            return []
        return _capped([max(w, 0.0) for w in self._shape(n)], ratio)

    def counts(self, ratio: float, layers: int, candidates: int) -> list[int]:
        """Tokens per layer 1…``layers``-1; they sum to round(r · candidates · (layers - 1)).

        Rounding is carried from layer to layer, so that the mean over layers is r to within one
        token in all, and the counts stay non-increasing.
        """
        counts: list[int] = []
        exact = 0.0
        for share in self.shares(ratio, layers):
            exact += share * candidates
            counts.append(max(0, round(exact) - sum(counts)))
        for i in range(1, len(counts)):  # carrying may lift a count one above its predecessor
            surplus = max(0, counts[i] - counts[i - 1])
            if surplus:
                counts[i] -= surplus
                _give(counts, surplus, candidates)
        return counts

    def _shape(self, n: int) -> list[float]:
        if self.name == "constant":
            return [1.0] * n
        if self.name == "linear":  # 1.5r → 0.5r
            return [1.5 - i / max(n - 1, 1) for i in range(n)]
        if self.name == "geometric":
            return [self.growth**i for i in range(n)]
        if self.name == "first":
            return [float(i < self.first) for i in range(n)]
        if self.is_open:
            raise InvalidInputError(
                "schedule 'calibrated' means what was found for a model and its corpus, expected an "
                "engine to look it up; name a family here or give the weights"
            )
        if len(self.weights) != n:
            raise InvalidInputError(
                f"schedule vector has {len(self.weights)} entries, this model needs {n} "
                "(one for each layer but the first)"
            )
        return list(self.weights)


def _capped(shape: list[float], ratio: float) -> list[float]:
    """Scale ``shape`` to mean ``ratio`` with every entry ≤ 1; what the cap takes is redistributed."""
    n = len(shape)
    for i in range(1, n):  # what rises by rounding alone
        shape[i] = min(shape[i], shape[i - 1])
    # Weights that vanish beside the first would overflow the scale that is to lift them.
    shape = [weight if weight > NEGLIGIBLE * shape[0] else 0.0 for weight in shape]
    total = ratio * n
    capped = 0
    while True:
        rest = sum(shape[capped:])
        left = total - capped
        if capped == n:
            return [1.0] * n
        if rest <= 0.0:  # the weights end before the budget does
            return [1.0] * capped + [left / (n - capped)] * (n - capped)
        scale = left / rest
        if shape[capped] * scale <= 1.0 + 1e-12:
            return [1.0] * capped + [min(1.0, w * scale) for w in shape[capped:]]
        capped += 1


def _give(counts: list[int], surplus: int, candidates: int) -> None:
    """Hand ``surplus`` tokens to the earliest layers that may take them."""
    for i in range(len(counts)):
        room = (candidates if i == 0 else counts[i - 1]) - counts[i]
        taken = min(room, surplus)
        counts[i] += taken
        surplus -= taken
        if not surplus:
            return


def _vector(text: str, whole: str) -> tuple[float, ...]:
    return _weights([_number(part, whole) for part in text.split(",")], whole)


def _weights(values: list[float], text: str) -> tuple[float, ...]:
    if not values or not all(math.isfinite(v) and v >= 0 for v in values) or max(values) <= 0:
        raise InvalidInputError(f"schedule {text!r}: weights must be 0 or more, and not all 0")
    for layer, (before, weight) in enumerate(pairwise(values), 2):
        if weight > before * (1 + ROUNDING):
            raise InvalidInputError(
                f"schedule vector rises from {before:g} to {weight:g} at layer {layer}, expected no "
                "weight above the one before: a token left out of a layer cannot come back later; lower "
                "it, or raise those before"
            )
    return tuple(float(v) for v in values)


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError as exc:
        raise InvalidInputError(f"schedule {whole!r}: {text!r} is not a number") from exc
