"""Stored parts of a prompt, and what a set of them adds up to.

No estimate asks more of a set than its sums, so one that differs from another in a part or two need not be
added up anew: deciding what to load tries as many sets as there are parts, before the first token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import Any, NamedTuple

from blendrag.planning.profile import Profile


@dataclass(frozen=True)
class Part:
    """A stretch of the prompt whose KV is stored: a chunk, or the leading part."""

    start: int
    end: int
    tier: str
    layer_bytes: tuple[int, ...]
    """As stored, the whole chunk's: its tail is read too where it is cut off."""
    exact: bool = False
    """Never recomputed."""

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def keys(self) -> float:
        """Σ over its tokens of the keys that each sees, itself included."""
        return (self.end * (self.end + 1) - self.start * (self.start + 1)) / 2


class Reading(NamedTuple):
    """Of each layer: seconds of reading, of a core's work at that, and bytes."""

    reads: tuple[float, ...]
    busy: tuple[float, ...]
    size_bytes: tuple[float, ...]


class Loaded(NamedTuple):
    """What a set of parts adds up to where they are loaded."""

    parts: int
    tokens: int
    keys: float
    """As :attr:`Part.keys`."""
    chunks: int
    """Parts that are not exact; candidates for recompute are their tokens."""
    candidates: int
    candidate_keys: float
    reading: Reading
    exact_first: tuple[float, ...]
    """Of the reading, what layer 0 of the exact parts is."""

    @classmethod
    def of(cls, profile: Profile, parts: Sequence[Part]) -> Loaded:
        """Raises :class:`KeyError` for a part in a tier that was not measured."""
        blended = [part for part in parts if not part.exact]
        alike = Counter((part.tier, part.layer_bytes) for part in parts)
        exact = Counter((part.tier, part.layer_bytes[:1]) for part in parts if part.exact)
        return cls(
            len(parts),
            sum(part.tokens for part in parts),
            sum(part.keys for part in parts),
            len(blended),
            sum(part.tokens for part in blended),
            sum(part.keys for part in blended),
            _reading(profile, alike, profile.layers),
            tuple(first for (first,) in _reading(profile, exact, 1)),
        )

    def plus(self, more: Loaded) -> Loaded:
        """With what is not among them yet."""
        return self._with(add, more)

    def minus(self, fewer: Loaded) -> Loaded:
        """Without some of them; sums but for rounding."""
        return self._with(sub, fewer)

    def _with(self, sign: Callable[[Any, Any], Any], other: Loaded) -> Loaded:
        *ours, reading, exact = self
        *theirs, its_reading, its_exact = other
        layers = (tuple(map(sign, a, b)) for a, b in zip(reading, its_reading, strict=True))
        first = tuple(map(sign, exact, its_exact))
        return Loaded._make([*map(sign, ours, theirs), Reading(*layers), first])


def _reading(
    profile: Profile, parts: Mapping[tuple[str, tuple[int, ...]], int], layers: int
) -> Reading:
    """Of so many parts of each tier and size."""
    reads, busy, sizes = [0.0] * layers, [0.0] * layers, [0.0] * layers
    for (name, layer_bytes), times in parts.items():
        tier = profile.tier(name)
        if tier is None:
            raise KeyError(name)
        for layer, size_bytes in enumerate(layer_bytes):
            seconds = times * tier.seconds(size_bytes)
            reads[layer] += seconds
            busy[layer] += tier.busy * seconds
            sizes[layer] += times * size_bytes
    return Reading(tuple(reads), tuple(busy), tuple(sizes))
