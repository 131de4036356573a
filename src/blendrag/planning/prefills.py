"""Which prefills are timed for a profile, and what their times say of layers, scout passes and the rest.

Owns the choice of prompts, policies and ratios, and the arithmetic over what they took. Does not know how
often each is run, nor by whom.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from blendrag.planning.curve import Curve, Point, fit
from blendrag.planning.model_times import ModelTimes, Shape, Timed

RATIOS = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)
FRESH = 24
#: Fresh tokens of the scout passes that are timed.
QUESTIONS = (16, 64, 256)
USUAL_RATIO = 0.15
#: A policy that looks at deviations, which costs more than its rows.
LOOKS = "hkvd"
#: A policy whose scout pass runs through all layers.
ASKS = "blend"
#: The longest prompt is so many times as long as the longest stock prefill, and of no more tokens than these:
#: what is loaded of it costs little, and questions are asked over such prompts, not over short ones.
FAR, FAR_TOKENS = 6, 8192

#: Lengths of stock prefills that are too few for a fit of their own.
FEW = 3

Key = tuple[str, float, Shape] | tuple[str, int]
"""A blended prefill's policy, ratio and prompt; or ``"prefill"`` and a length."""
Found = Mapping[Key, Timed]


@dataclass(frozen=True)
class Job:
    """One prefill to time, several times."""

    what: str
    run: Callable[[], Timed]


class Prefills:
    """Stock prefills of ``lengths``; blended ones of prompts as long as the last of them and half as long, at
    any ratio; and of a far longer one, as long as no more tokens of it are computed."""

    def __init__(
        self, times: ModelTimes, layers: int, chunk_tokens: int, lengths: Sequence[int]
    ) -> None:
        self._times = times
        self._layers = layers
        self.lengths = tuple(lengths)
        longest = lengths[-1]
        chunk = min(chunk_tokens, max(8, (longest - FRESH) // 4))
        chunks = max(2, (longest - FRESH) // chunk)
        self._shapes = (Shape(chunks, chunk, FRESH), Shape(max(1, chunks // 2), chunk, FRESH))
        far = min(FAR * longest, FAR_TOKENS, times.longest) - FRESH
        self._far = Shape(max(1, far // chunk_tokens), chunk_tokens, FRESH)
        self._random = [(ratio, shape) for shape in self._shapes for ratio in RATIOS]
        if self._far.tokens > self._shapes[0].tokens:
            rows = [(r, FRESH + r * self._far.candidates) for r in RATIOS]
            self._random += [(ratio, self._far) for ratio, computed in rows if computed <= longest]
        asked = sorted({shape for _, shape in self._random}, key=lambda shape: -shape.tokens)[:2]
        self._asking = [self._fitting(replace(s, fresh=n)) for s in asked for n in QUESTIONS]

    def jobs(self) -> dict[Key, Job]:
        """All of them, by what they measure."""
        jobs: dict[Key, Job] = {
            ("prefill", n): Job(f"prefill of {n} tokens", partial(self._times.stock, n))
            for n in self.lengths
        }
        asked = [("random", ratio, shape) for ratio, shape in self._random]
        asked += [(ASKS, 0.0, shape) for shape in self._asking]
        asked += [(LOOKS, USUAL_RATIO, shape) for shape in self._shapes]
        for policy, ratio, shape in asked:
            what = f"{policy} at ratio {ratio:g} over {shape.tokens} tokens"
            jobs[policy, ratio, shape] = Job(
                what, partial(self._times.blended, shape, policy, ratio)
            )
        return jobs

    def _fitting(self, shape: Shape) -> Shape:
        over = shape.tokens - self._times.longest
        return shape if over <= 0 else replace(shape, fresh=max(1, shape.fresh - over))

    # -- what follows -------------------------------------------------------------------------------

    def prefill_points(self, found: Found) -> list[Point]:
        return [Point(n, n / 2, 0, found["prefill", n].total_s) for n in self.lengths]

    def prefill_curve(self, found: Found, layer: Curve) -> Curve:
        """Of a stock prefill. Few lengths do not tell what grows with the length from what grows with its
        square: there the latter is as measured of the layers, whose contexts differ more."""
        points = self.prefill_points(found)
        return fit(points, self._layers * layer.pair_s if len(points) <= FEW else None)

    def layer_points(self, found: Found) -> list[Point]:
        """Of the layers before the last, but in a model of one layer."""
        points = []
        for ratio, shape in self._random:
            timed = found["random", ratio, shape]
            before_s = timed.passes[0] - timed.lasts[0]
            each = before_s / (self._layers - 1) if self._layers > 1 else timed.lasts[0]
            points.append(self._point(ratio, shape, each))
        return points

    def last_points(self, found: Found) -> list[Point]:
        """Of the last layer, which computes K and V of all rows and the rest of one."""
        return [self._point(r, s, found["random", r, s].lasts[0]) for r, s in self._random]

    def _point(self, ratio: float, shape: Shape, seconds: float) -> Point:
        return shape.point(round(ratio * shape.candidates), shape.candidates, seconds)

    def scout_points(self, found: Found) -> list[Point]:
        return [
            s.point(0, s.candidates, found[ASKS, 0.0, s].passes[0] / self._layers)
            for s in self._asking
        ]

    def outside_s(self, found: Found) -> float:
        """What a usual blended prefill takes outside of its layers."""
        return statistics.median(found["random", r, s].outside_s for r, s in self._random)

    def peek_s(self, found: Found, layer: Curve) -> float:
        """What looking costs on top, by token: what is left of whole runs' times."""
        looking = []
        for shape in self._shapes:
            rows = shape.point(round(USUAL_RATIO * shape.candidates), shape.candidates, 0.0)
            whole = shape.point(shape.candidates, 0.0, 0.0)
            plain = found["random", USUAL_RATIO, shape].passes[0]
            # layer 0 is computed whole there, and is not moved to its place
            entry = layer(*whole[:3]) - layer(*rows[:3])
            left = found[LOOKS, USUAL_RATIO, shape].passes[0] - plain - entry
            looking.append(left / shape.tokens)
        return max(0.0, statistics.fmean(looking))
