"""What one prompt will take: its time to first token, of which loading, of which computing.

Follows the fusor pass by pass. A policy that *asks* first runs the fresh tokens over what is loaded, through
some or all layers (the scout): loading of those layers hides behind that pass. A policy that *looks* computes
layer 0 for all candidates, and peeks at layer 1. Any other computes its chosen tokens in every layer while
the next one loads. Candidates that are all computed in layer 0 are not loaded there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blendrag.planning.parts import Loaded, Part
from blendrag.planning.pipeline import arrivals, finish
from blendrag.planning.profile import Profile


@dataclass(frozen=True)
class Prompt:
    """A prompt and how its policy goes about it."""

    tokens: int
    parts: tuple[Part, ...]
    needs_deviation: bool = False
    scouted_layers: int = 0
    """Layers of the scout pass; 0: there is none."""


@dataclass(frozen=True)
class Forecast:
    """Predicted seconds. ``ttft_s`` is what the two take overlapped, so at most their sum."""

    ttft_s: float
    load_s: float
    compute_s: float


@dataclass(frozen=True)
class Loading:
    """Seconds of each layer: of reading, of a core's work at that, and of copying to the device."""

    reads: tuple[float, ...]
    busy: tuple[float, ...]
    copies: tuple[float, ...]
    """Empty where computing is on the host."""

    @property
    def arrived(self) -> list[float]:
        """When each layer is there, from the start."""
        return arrivals(self.reads, self.copies)


class Estimator:
    """One prompt with what is loaded of it, for any number of recomputed tokens.

    Raises :class:`KeyError` for a part in a tier that was not measured.
    """

    def __init__(self, profile: Profile, prompt: Prompt, loaded: Loaded | Sequence[Part]) -> None:
        if not isinstance(loaded, Loaded):
            loaded = Loaded.of(profile, loaded)
        self.profile = profile
        self._prompt = prompt
        self._loaded = loaded
        self.candidates, self.chunks = loaded.candidates, loaded.chunks
        self._placed = loaded.tokens
        self._keys = loaded.candidate_keys / self.candidates if self.candidates else 0.0
        self._fresh = prompt.tokens - self._placed
        all_keys = prompt.tokens * (prompt.tokens + 1) / 2
        self._fresh_keys = all_keys - loaded.keys
        self._scouted = prompt.scouted_layers if self.candidates else 0
        self.needs_deviation = prompt.needs_deviation and self.candidates > 0
        self._loading: dict[bool, Loading] = {}
        self._layer_s: dict[tuple[float, float, bool], float] = {}
        self._scout_s, self._scouted_s = self._scouting() if self._scouted else (0.0, 0.0)
        self.before_s = profile.fixed_s + self._scouted_s
        """Until the pass that recomputes begins, and what comes after it."""

    def at(self, counts: Sequence[float]) -> Forecast:
        """With ``counts`` candidates recomputed in layers 1…L-1."""
        if not self._loaded.parts:
            seconds = self.profile.prefill_s(self._prompt.tokens)
            return Forecast(seconds, 0.0, seconds)
        computes = self.computes(counts)
        ttft_s = self.before_s + finish(self.arrived(counts), computes)
        compute_s = sum(computes) + self._scout_s + self.profile.fixed_s
        return Forecast(ttft_s, sum(self._of(counts).reads), compute_s)

    def waiting_s(self, counts: Sequence[float]) -> float:
        """How much longer it takes than if all were in place from the start."""
        predicted = self.at(counts)
        return predicted.ttft_s - predicted.compute_s

    def arrived(self, counts: Sequence[float]) -> list[float]:
        """When the layers are there, by the clock of the pass that recomputes."""
        there = [max(0.0, at - self._scouted_s) for at in self._of(counts).arrived]
        return [0.0] * self._scouted + there[self._scouted :]

    def first_load_s(self, counts: Sequence[float]) -> float:
        """Until layer 0 is there, which nothing can hide; as long as a layer computes at most, or most of
        what a model of few layers loads would count as its first."""
        computes = [self._scout_s / self._scouted] if self._scouted else self.computes(counts)
        return min(self._of(counts).arrived[0], max(computes))

    def computes(self, counts: Sequence[float]) -> list[float]:
        """Seconds of each layer of the pass that recomputes."""
        profile = self.profile
        if not self.candidates:  # no policy is asked
            counts = [0.0] * (profile.layers - 1)
        skips = self._skips_first(counts)
        seconds = [
            self._layer(layer, chosen, skips and layer == 0)
            for layer, chosen in enumerate((self._entering(counts), *counts))
        ]
        if self.needs_deviation and len(seconds) > 1:
            seconds[1] += profile.peek_s * (self._fresh + self.candidates)
        if profile.is_shared:
            for layer, busy in enumerate(self._of(counts).busy):
                seconds[layer] += busy * (layer >= self._scouted)
        return seconds

    # -- computing --------------------------------------------------------------------------------

    def _layer(self, layer: int, chosen: float, skips_load: bool) -> float:
        placed = self._placed - skips_load * self.candidates
        if layer < self._scouted:  # the scout pass has moved all of it to its place
            placed = 0
        is_last = layer == self.profile.layers - 1
        key = (chosen, placed, is_last)
        known = self._layer_s.get(key)
        if known is None:
            rows = self._fresh + chosen
            context = (self._fresh_keys + chosen * self._keys) / rows if rows else 0.0
            curve = self.profile.last if is_last else self.profile.layer
            known = self._layer_s[key] = curve(rows, context, placed)
        return known

    def _entering(self, counts: Sequence[float]) -> float:
        """Candidates computed in layer 0."""
        if self.needs_deviation or not counts:
            return self.candidates
        return counts[0]

    def _scouting(self) -> tuple[float, float]:
        """Of the scout pass: seconds of computing, and with the waits for what it reads."""
        loading, layers = self._of_layers(skips_first=False), self._scouted
        context = self._fresh_keys / self._fresh if self._fresh else 0.0
        each = self.profile.scout(self._fresh, context, self._placed)
        computes = [each + busy * self.profile.is_shared for busy in loading.busy[:layers]]
        return sum(computes), finish(loading.arrived[:layers], computes)

    # -- loading ----------------------------------------------------------------------------------

    def _skips_first(self, counts: Sequence[float]) -> bool:
        """Whether layer 0 of what is blended is not loaded, as all of it is computed there anyway. After a
        scout pass it has been."""
        return not self._scouted and self._entering(counts) >= self.candidates > 0

    def _of(self, counts: Sequence[float]) -> Loading:
        return self._of_layers(self._skips_first(counts))

    def _of_layers(self, skips_first: bool) -> Loading:
        if skips_first not in self._loading:
            self._loading[skips_first] = _loading(self._loaded, skips_first, self.profile)
        return self._loading[skips_first]


def forecast(
    profile: Profile, prompt: Prompt, loaded: Sequence[Part], counts: Sequence[float]
) -> Forecast:
    """T_ttft of ``prompt`` with ``loaded`` of its parts and ``counts`` recomputed in layers 1…L-1."""
    return Estimator(profile, prompt, loaded).at(counts)


def _loading(loaded: Loaded, skips_first: bool, profile: Profile) -> Loading:
    """``skips_first``: without layer 0 of what is not exact."""
    reads, busy, sizes = loaded.reading
    if skips_first:
        first = zip(loaded.exact_first, loaded.reading, strict=True)
        reads, busy, sizes = ((exact, *every[1:]) for exact, every in first)
    speed = profile.device_bytes_per_s
    copies = tuple(size / speed for size in sizes) if speed else ()
    return Loading(reads, busy, copies)
