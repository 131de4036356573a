"""Invented profiles whose every figure can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from blendrag.planning.choice import Choice, choose
from blendrag.planning.estimate import Estimator, Forecast, LoadEstimate, PromptParts, StoredPart
from blendrag.planning.profile import Conditions, Curve, Profile, Tier

LAYERS = 4
CHUNK = 100
#: Of a chunk, per layer.
LAYER_BYTES = 1000
CONDITIONS = Conditions("a" * 64, "m", "float32", "cpu", 1, "2", "5", "0", "here")


def line(row_s: float, pair_s: float = 0.0, placed_s: float = 0.0) -> Curve:
    """Seconds in proportion to rows."""
    return Curve((1.0, 1000.0), (row_s, 1000 * row_s), row_s, pair_s, placed_s)


def profile(bytes_per_s: float = 1e9, **changes: Any) -> Profile:
    """A millisecond per row and layer; one tier ``disk``; nothing outside the layers."""
    given: dict[str, Any] = {
        "conditions": CONDITIONS,
        "prefill": line(LAYERS * 1e-3),
        "layer": line(1e-3),
        "last": changes.get("layer", line(1e-3)),
        "scout": line(1e-3),
        "peek_s": 0.0,
        "shift_s": 0.0,
        "fixed_s": 0.0,
        "tiers": (Tier("disk", bytes_per_s),),
        "device_bytes_per_s": None,
        "is_shared": False,
        "chunk_tokens": CHUNK,
        "layer_bytes": (LAYER_BYTES,) * LAYERS,
        "took_s": 1.0,
    }
    return Profile(**{**given, **changes})


def prompt(chunks: int = 3, fresh: int = 20, tier: str = "disk", **policy: Any) -> PromptParts:
    parts = tuple(
        StoredPart(i * CHUNK, (i + 1) * CHUNK, tier, (LAYER_BYTES,) * LAYERS) for i in range(chunks)
    )
    return PromptParts(chunks * CHUNK + fresh, parts, **policy)


def evenly(ratio: float, candidates: int, chunks: int = 0) -> Sequence[float]:
    return [round(ratio * candidates)] * (LAYERS - 1)


def forecast(
    made: Profile, asked: PromptParts, counts: Sequence[float], loaded: Iterable[int] | None = None
) -> Forecast:
    parts = range(len(asked.parts)) if loaded is None else loaded
    return Estimator(made, asked).loading(list(parts)).at(counts)


def chosen(
    made: Profile,
    asked: PromptParts,
    min_ratio: float = 0.15,
    counts: Callable[[float, int, int], Sequence[float]] = evenly,
    budgeted: bool = True,
) -> Choice:
    def at(estimate: LoadEstimate, ratio: float) -> Forecast:
        return estimate.at(counts(ratio, estimate.candidates, estimate.chunks))

    return choose(Estimator(made, asked), at, min_ratio, budgeted)
