"""What one prompt will take: its time to first token, of which loading, of which computing.

Follows the fusor pass by pass. A policy that *asks* first runs the fresh tokens over all that is loaded
(the scout): loading hides behind that pass, and recompute begins when everything is there. A policy that
*looks* computes layer 0 for all candidates, does not load them there, and peeks at layer 1. Any other
computes its chosen tokens in every layer while the next one loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blendrag.estimates.pipeline import arrivals, finish
from blendrag.estimates.profile import Profile


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


@dataclass(frozen=True)
class Prompt:
    """A prompt and how its policy goes about it."""

    tokens: int
    parts: tuple[Part, ...]
    looks: bool = False
    asks: bool = False
    shifts: bool = False


@dataclass(frozen=True)
class Forecast:
    """Predicted seconds. ``ttft_s`` is what the two take overlapped, so at most their sum."""

    ttft_s: float
    load_s: float
    compute_s: float


class Estimator:
    """One prompt with what is loaded of it, for any number of recomputed tokens.

    Raises :class:`KeyError` for a part in a tier that was not measured.
    """

    def __init__(self, profile: Profile, prompt: Prompt, loaded: Sequence[Part]) -> None:
        self.profile = profile
        self._prompt = prompt
        self._is_plain = not loaded
        blended = [part for part in loaded if not part.exact]
        self.candidates = sum(part.tokens for part in blended)
        self._placed = sum(part.tokens for part in loaded)
        keys = sum(part.keys for part in blended)
        self._keys = keys / self.candidates if self.candidates else 0.0
        self._fresh = prompt.tokens - self._placed
        all_keys = prompt.tokens * (prompt.tokens + 1) / 2
        self._fresh_keys = all_keys - sum(part.keys for part in loaded)
        self._asks = prompt.asks and self.candidates > 0
        self.looks = prompt.looks and self.candidates > 0
        self._reads, self._busy, self._copies = _loads(profile, loaded, self.looks)
        self.arrived = [0.0] * profile.layers if self._asks else arrivals(self._reads, self._copies)
        """When the layers are there, by the clock of the pass that recomputes."""
        self.before_s = profile.fixed_s + (self._scouted() if self._asks else 0.0)
        """Until that pass begins, and what comes after it."""
        self.load_s = sum(self._reads)
        self.first_load_s = next(
            (arrived for arrived in arrivals(self._reads, self._copies) if arrived), 0.0
        )
        """Until the first layer that is loaded at all is there: nothing can hide that."""
        self._layer_s: dict[tuple[float, bool], float] = {}

    def at(self, counts: Sequence[float]) -> Forecast:
        """With ``counts`` candidates recomputed in layers 1…L-1."""
        if self._is_plain:
            seconds = self.profile.prefill_s(self._prompt.tokens)
            return Forecast(seconds, 0.0, seconds)
        computes = self.computes(counts)
        ttft_s = self.before_s + finish(self.arrived, computes)
        scout_s = sum(self._scout_computes()) if self._asks else 0.0
        return Forecast(ttft_s, self.load_s, sum(computes) + scout_s + self.profile.fixed_s)

    def waiting_s(self, counts: Sequence[float]) -> float:
        """How much longer it takes than if all were in place from the start."""
        predicted = self.at(counts)
        return predicted.ttft_s - predicted.compute_s

    def computes(self, counts: Sequence[float]) -> list[float]:
        """Seconds of each layer of the pass that recomputes."""
        profile = self.profile
        if not self.candidates:  # no policy is asked
            counts = [0.0] * (profile.layers - 1)
        entry = self.candidates if self.looks else (counts[0] if counts else self.candidates)
        seconds = [self.layer_s(chosen) for chosen in (entry, *counts)]
        if self.looks and len(seconds) > 1:
            seconds[1] += profile.peek_s * (self._fresh + self.candidates)
        if self._prompt.shifts:
            shift_s = profile.shift_s * self.candidates
            seconds = [s + shift_s * (layer > 0) for layer, s in enumerate(seconds)]
        if profile.is_shared and not self._asks:
            seconds = [s + busy for s, busy in zip(seconds, self._busy, strict=True)]
        return seconds

    def layer_s(self, chosen: float) -> float:
        """T_recompute of one layer: of the fresh tokens and ``chosen`` candidates."""
        known = self._layer_s.get((chosen, self._asks))
        if known is None:
            rows = self._fresh + chosen
            context = (self._fresh_keys + chosen * self._keys) / rows if rows else 0.0
            placed = 0 if self._asks else self._placed
            known = self._layer_s[chosen, self._asks] = self.profile.layer(rows, context, placed)
        return known

    def most_within(self, seconds: float) -> int:
        """The largest number of chosen candidates that a layer computes within ``seconds``."""
        low, high = 0, self.candidates
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.layer_s(middle) <= seconds else (low, middle - 1)
        return low

    def _scout_computes(self) -> list[float]:
        context = self._fresh_keys / self._fresh if self._fresh else 0.0
        each = self.profile.scout(self._fresh, context, self._placed)
        busy = self._busy if self.profile.is_shared else [0.0] * self.profile.layers
        return [each + b for b in busy]

    def _scouted(self) -> float:
        return finish(arrivals(self._reads, self._copies), self._scout_computes())


def forecast(
    profile: Profile, prompt: Prompt, loaded: Sequence[Part], counts: Sequence[float]
) -> Forecast:
    """T_ttft of ``prompt`` with ``loaded`` of its parts and ``counts`` recomputed in layers 1…L-1."""
    return Estimator(profile, prompt, loaded).at(counts)


def _loads(
    profile: Profile, loaded: Sequence[Part], looks: bool
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of reading, busy with it, and of copying, per layer."""
    layers = profile.layers
    reads, busy, sizes = [0.0] * layers, [0.0] * layers, [0.0] * layers
    for part in loaded:
        tier = profile.tier(part.tier)
        if tier is None:
            raise KeyError(part.tier)
        for layer, size_bytes in enumerate(part.layer_bytes):
            if layer == 0 and looks and not part.exact:
                continue  # computed whole there
            seconds = tier.seconds(size_bytes)
            reads[layer] += seconds
            busy[layer] += tier.busy * seconds
            sizes[layer] += size_bytes
    speed = profile.device_bytes_per_s
    return reads, busy, [size / speed for size in sizes] if speed else []
