"""Invented profiles whose every figure can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blendrag.planning.choice import Wish
from blendrag.planning.curve import Curve
from blendrag.planning.forecast import Prompt
from blendrag.planning.parts import Part
from blendrag.planning.profile import Conditions, Profile, Tier

LAYERS = 4
CHUNK = 100
#: Of a chunk, per layer.
LAYER_BYTES = 1000
CONDITIONS = Conditions("a" * 64, "m", "float32", "cpu", 1, "2", "5", "0", "here")


def line(row_s: float, pair_s: float = 0.0, placed_s: float = 0.0) -> Curve:
    """Seconds in proportion to rows."""
    return Curve((1.0, 1000.0), (row_s, 1000 * row_s), row_s, pair_s, placed_s)


def profile(bytes_per_s: float = 1e9, **changes: Any) -> Profile:
    """A millisecond a row and layer; one tier ``disk``; nothing outside the layers."""
    given: dict[str, Any] = {
        "conditions": CONDITIONS,
        "prefill": line(LAYERS * 1e-3),
        "layer": line(1e-3),
        "last": changes.get("layer", line(1e-3)),
        "scout": line(1e-3),
        "peek_s": 0.0,
        "fixed_s": 0.0,
        "tiers": (Tier("disk", bytes_per_s),),
        "device_bytes_per_s": None,
        "is_shared": False,
        "chunk_tokens": CHUNK,
        "layer_bytes": (LAYER_BYTES,) * LAYERS,
        "took_s": 1.0,
        "measured": {},
    }
    return Profile(**{**given, **changes})


def prompt(chunks: int = 3, fresh: int = 20, tier: str = "disk", **policy: int) -> Prompt:
    parts = tuple(
        Part(i * CHUNK, (i + 1) * CHUNK, tier, (LAYER_BYTES,) * LAYERS) for i in range(chunks)
    )
    return Prompt(chunks * CHUNK + fresh, parts, **policy)


def evenly(ratio: float, candidates: int, chunks: int = 0) -> Sequence[float]:
    return [round(ratio * candidates)] * (LAYERS - 1)


def wish(
    min_ratio: float = 0.15,
    counts: Callable[[float, int, int], Sequence[float]] = evenly,
) -> Wish:
    return Wish(min_ratio, counts)
