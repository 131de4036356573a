"""How long one prompt takes on this machine: its time to first token, from the figures of a profile.

Follows the fusor: loading hides behind a scout pass, as far as that goes, and behind the computing of the
layers before. Candidates that are all computed in layer 0 are not loaded there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from blendrag.planning.profile import Profile


@dataclass(frozen=True)
class StoredPart:
    """A stretch of the prompt whose KV is stored: a chunk, or everything before the first one."""

    start: int
    end: int
    tier: str
    layer_bytes: tuple[int, ...]
    """As stored, of the whole chunk: a chunk that is cut off is read whole."""
    exact: bool = False
    """Never recomputed."""

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def keys(self) -> float:
        """Sum over its tokens of the keys that each sees."""
        return (self.end * (self.end + 1) - self.start * (self.start + 1)) / 2


@dataclass(frozen=True)
class PromptParts:
    """A prompt, the parts of it that are stored, and what its policy needs."""

    tokens: int
    parts: tuple[StoredPart, ...]
    needs_deviation: bool = False
    scouted_layers: int = 0
    """Layers of the scout pass; 0 without one."""
    moves_others: bool = False


@dataclass(frozen=True)
class Forecast:
    """Predicted seconds. Loading and computing overlap, so ``ttft_s`` is at most their sum."""

    ttft_s: float
    load_s: float
    compute_s: float


class Estimator:
    """One prompt with any set of its parts loaded; fast, because the controller tries many sets."""

    def __init__(self, profile: Profile, prompt: PromptParts) -> None:
        """Raises :class:`KeyError` for a part in a tier that was not measured."""
        self.profile, self.prompt = profile, prompt
        parts = prompt.parts
        self.tokens = np.array([part.tokens for part in parts], dtype=np.int64)  # [P]
        self.keys = np.array([part.keys for part in parts])  # [P]
        self.exact = np.array([part.exact for part in parts], dtype=bool)  # [P]
        self.loads = np.zeros((3, len(parts), profile.layers))  # [reads, busy, bytes; P; L]
        for i, part in enumerate(parts):
            tier = profile.tier(part.tier)
            if tier is None:
                raise KeyError(part.tier)
            sizes = np.array(part.layer_bytes, dtype=float)
            reads = sizes / tier.bytes_per_s + tier.read_s
            self.loads[:, i] = reads, tier.busy * reads, sizes

    def load_s(self, part: int) -> float:
        return float(self.loads[0, part].sum())

    def loading(self, parts: Iterable[int] | None = None) -> LoadEstimate:
        """With those parts loaded, by index, or all."""
        return LoadEstimate(self, list(range(len(self.prompt.parts)) if parts is None else parts))


class LoadEstimate:
    """One prompt with some of its parts loaded, for any number of recomputed tokens."""

    def __init__(self, of: Estimator, chosen: list[int], selects: bool = True) -> None:
        """``selects``: whether the policy chooses tokens; it does not where nothing is recomputed."""
        prompt = of.prompt
        self._of, self._chosen, self._selects = of, chosen, selects
        self._profile, self._prompt = of.profile, prompt
        self.layers, self.parts = of.profile.layers, len(chosen)
        exact = of.exact[chosen]
        tokens, keys, loads = of.tokens[chosen], of.keys[chosen], of.loads[:, chosen]
        self.chunks = int((~exact).sum())
        self.candidates = int(tokens[~exact].sum())
        self._placed = int(tokens.sum())
        self._keys = float(keys[~exact].sum()) / max(self.candidates, 1)
        self._fresh = prompt.tokens - self._placed
        self._fresh_keys = prompt.tokens * (prompt.tokens + 1) / 2 - float(keys.sum())
        whole = loads.sum(axis=1)  # [3, L]
        entry_exact = whole.copy()
        entry_exact[:, 0] = loads[:, exact, 0].sum(axis=1)
        self._loads = {False: whole.tolist(), True: entry_exact.tolist()}
        selects = selects and self.candidates > 0
        self._scouted = prompt.scouted_layers if selects else 0
        self._needs_deviation = prompt.needs_deviation and selects
        moves = prompt.moves_others and selects
        self._shift_s = of.profile.shift_s * self.candidates * moves
        """In each layer that moves chunk tokens."""
        self._scout_s, self._scouted_s = self._scouting() if self._scouted else (0.0, 0.0)

    def at(self, counts: Sequence[float]) -> Forecast:
        """With ``counts`` candidates recomputed in layers 1…L-1."""
        profile = self._profile
        if self._selects and len(counts) and not any(counts):
            return self._reusing.at(counts)
        if not self.parts:
            seconds = profile.prefill_s(self._prompt.tokens)
            return Forecast(seconds, 0.0, seconds)
        computes = self._computes(counts)
        arrived = [max(0.0, at - self._scouted_s) for at in self._arrived(counts)]
        arrived[: self._scouted] = [0.0] * self._scouted
        ttft_s = profile.fixed_s + self._scouted_s + finish(arrived, computes)
        compute_s = profile.fixed_s + self._scout_s + sum(computes)
        return Forecast(ttft_s, sum(self._loads[self._skips_first(counts)][0]), compute_s)

    def waiting_s(self, counts: Sequence[float]) -> float:
        """How much longer it takes than if everything were loaded from the start."""
        predicted = self.at(counts)
        return predicted.ttft_s - predicted.compute_s

    def first_load_s(self, counts: Sequence[float]) -> float:
        """Loading of layer 0, which nothing can hide, but no more than a layer's compute."""
        if self._selects and len(counts) and not any(counts):
            return self._reusing.first_load_s(counts)
        computes = [self._scout_s / self._scouted] if self._scouted else self._computes(counts)
        return min(self._arrived(counts)[0], max(computes))

    @cached_property
    def _reusing(self) -> LoadEstimate:
        """The same where nothing is recomputed."""
        return LoadEstimate(self._of, self._chosen, selects=False)

    # -- computing --------------------------------------------------------------------------------

    def _computes(self, counts: Sequence[float]) -> list[float]:
        """Seconds of each layer of the pass that recomputes."""
        profile = self._profile
        if not self.candidates:
            counts = [0.0] * (profile.layers - 1)
        skips = self._skips_first(counts)
        known: dict[tuple[float, float, bool], float] = {}
        seconds = []
        for layer, chosen in enumerate((self._entering(counts), *counts)):
            placed = self._placed - self.candidates * (skips and layer == 0)
            if layer < self._scouted:  # the scout pass has moved everything to its place
                placed = 0
            is_last = layer == profile.layers - 1
            key = (chosen, placed, is_last)
            if key not in known:
                rows = self._fresh + chosen
                context = (self._fresh_keys + chosen * self._keys) / rows if rows else 0.0
                curve = profile.last if is_last else profile.layer
                known[key] = curve(rows, context, placed)
            reading = profile.is_shared and layer >= self._scouted
            seconds.append(known[key] + (self._loads[skips][1][layer] if reading else 0.0))
        if self._needs_deviation and len(seconds) > 1:
            seconds[1] += profile.peek_s * (self._fresh + self.candidates)
        moving = (self._shift_s * (chosen > 0) for chosen in counts)
        return [seconds[0], *(sum(pair) for pair in zip(seconds[1:], moving, strict=True))]

    def _entering(self, counts: Sequence[float]) -> float:
        return self.candidates if self._needs_deviation or not counts else counts[0]

    def _scouting(self) -> tuple[float, float]:
        """Seconds of the scout pass: of computing, and with its waits for loading."""
        context = self._fresh_keys / max(self._fresh, 1)
        each = self._profile.scout(self._fresh, context, self._placed)
        busy = self._loads[False][1][: self._scouted]
        computes = [each + core * self._profile.is_shared for core in busy]
        return sum(computes), finish(self._arrived(())[: self._scouted], computes)

    # -- loading ----------------------------------------------------------------------------------

    def _skips_first(self, counts: Sequence[float]) -> bool:
        """Whether layer 0 of blended chunks is not loaded, because all of it is computed there."""
        return not self._scouted and self._entering(counts) >= self.candidates > 0

    def _arrived(self, counts: Sequence[float]) -> list[float]:
        """When each layer is in place: on the host once it is read, else once it is copied, too."""
        reads, _, sizes = self._loads[self._skips_first(counts)]
        speed = self._profile.device_bytes_per_s
        return arrivals(reads, [size / speed if speed else 0.0 for size in sizes])


# -- pipeline: reading, copying and computing, each one layer at a time and in order ------------------


def arrivals(reads: Sequence[float], copies: Sequence[float]) -> list[float]:
    """When each layer's KV is in place: copied after it was read and after the copy before."""
    done, arrived = 0.0, []
    for read, copy in zip(accumulate(reads), copies, strict=True):
        done = max(read, done) + copy
        arrived.append(done)
    return arrived


def finish(arrived: Sequence[float], computes: Sequence[float]) -> float:
    """When the last layer is computed: each after it arrived and after the layer before."""
    done = 0.0
    for arrival, compute in zip(arrived, computes, strict=True):
        done = max(done, arrival) + compute
    return done
