"""One profile, step by step, each short, so that whoever waits can be told how far it is.

Nothing is kept here: a profile is whole when all steps are done, or is not at all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from blendrag.estimates import Conditions, Curve, Profile, Tier
from blendrag.estimates.curve import Point, fit
from blendrag.fusor import Fusor
from blendrag.kv import ChunkKV
from blendrag.model.adapter import ModelAdapter
from blendrag.profile.model_times import SHORTEST, ModelTimes, Shape, Timed, usual
from blendrag.profile.record import cores
from blendrag.profile.tier_times import measure_device, measure_directory, measure_memory
from blendrag.store.encodings import stored_layer_bytes

T = TypeVar("T")
#: Told before every step: what it is, how many are done, and of how many.
Watch = Callable[[str, int, int], None]

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
#: No longer prefill is timed than the first that takes as long as this.
LONG_S = 2.0
RATIOS = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)
FRESH = 24
#: Fresh tokens of the scout passes that are timed.
QUESTIONS = (16, 64, 256)
USUAL_RATIO = 0.15
LOOKS, SHIFTS = "hkvd", "offset+random"
#: Policies that cost more than their rows.
EXTRAS = (LOOKS, SHIFTS)
#: Every prefill is timed so often, the first time to warm up, unless that takes longer than the seconds.
ROUNDS = 6
ROUNDS_S = 25.0


#: Times by what was timed.
Found = Mapping[Any, Timed]


class Runner(Protocol):
    """Runs work where the model's work is done, and waits for it."""

    def __call__(self, call: Callable[[], T], /) -> T: ...


@dataclass(frozen=True)
class _Job:
    """One prefill to time, several times."""

    what: str
    run: Callable[[], Timed]


class Measure:
    """Measures one model over one store's directory. ``run`` is the engine's worker, ``watch`` a display."""

    def __init__(
        self,
        adapter: ModelAdapter,
        fusor: Fusor,
        encoding: str,
        prefix_ids: Sequence[int],
        chunk_tokens: int,
        run: Runner,
        watch: Watch,
    ) -> None:
        self._adapter = adapter
        self._times = ModelTimes(adapter, fusor, prefix_ids)
        self._encoding = encoding
        self._chunk_tokens = min(chunk_tokens, self._times.longest // 4)
        self._run = run
        self._watch = watch
        self._layers = len(adapter.layout.layers)
        self._done = self._steps = 0

    def profile(
        self, conditions: Conditions, root: Path, directories: Sequence[Path] = ()
    ) -> Profile:
        """All of it: tiers below ``root`` and in ``directories``, then the model. Well under a minute for
        a small one. Raises what the model, the store or a directory raises."""
        began = time.monotonic()
        lengths = [n for n in LENGTHS if n <= self._times.longest] or [SHORTEST]
        jobs = 2 * len(RATIOS) + 2 * len(QUESTIONS) + 2 * len(EXTRAS)
        self._begin(3 + len(directories) + len(lengths) + ROUNDS * (len(lengths) + jobs))
        tiers, device_bytes_per_s = self._read(root, directories)
        lengths = self._bearable(lengths)
        shapes = self._shapes(lengths[-1])
        found = self._in_rounds(self._jobs(lengths, shapes))
        layer = fit(self._layer_points(found, shapes))
        peek_s, shift_s = self._extras(found, shapes, layer)
        return Profile(
            conditions=conditions,
            prefill=fit(Point(n, n / 2, 0, found["prefill", n].total_s) for n in lengths),
            layer=layer,
            scout=fit(self._scout_points(found, shapes)),
            peek_s=peek_s,
            shift_s=shift_s,
            fixed_s=self._outside(found, shapes),
            tiers=tiers,
            device_bytes_per_s=device_bytes_per_s,
            is_shared=self._adapter.device.type == "cpu" and torch.get_num_threads() >= cores(),
            chunk_tokens=self._chunk_tokens,
            layer_bytes=tuple(self._layer_bytes()),
            took_s=time.monotonic() - began,
            measured={
                "prefill": [[n, found["prefill", n].total_s] for n in lengths],
                "layer": [list(point) for point in self._layer_points(found, shapes)],
                "scout": [list(point) for point in self._scout_points(found, shapes)],
            },
        )

    def with_directories(self, known: Profile, directories: Sequence[Path]) -> Profile:
        """``known`` and the tiers of some more directories."""
        self._begin(1 + len(directories))
        kvs = self._chunks()
        tiers = [tier for path in directories for tier in self._directory(path, kvs)]
        names = {tier.name for tier in tiers}
        kept = [tier for tier in known.tiers if tier.name not in names]
        return replace(known, tiers=(*kept, *tiers))

    # -- the steps ------------------------------------------------------------------------------

    def _begin(self, steps: int) -> None:
        self._done, self._steps = 0, steps

    def _step(self, what: str) -> None:
        self._watch(what, self._done, self._steps)
        self._done += 1

    def _chunks(self) -> list[ChunkKV]:
        """A long chunk and a short one, as the store keeps them."""
        self._step("encoding a chunk")
        lengths = (self._chunk_tokens, max(8, self._chunk_tokens // 8))
        made = [self._model(partial(self._times.chunk, n)) for n in lengths]
        return [replace(kv, layout=kv.layout.encoded(self._encoding)) for kv in made]

    def _read(
        self, root: Path, directories: Sequence[Path]
    ) -> tuple[tuple[Tier, ...], float | None]:
        kvs = self._chunks()
        self._step("reading from memory")
        tiers = [measure_memory(kvs, self._pinned)]
        self._step("reading from disk")
        tiers += measure_directory(root, kvs, self._pinned)
        for path in directories:
            tiers += self._directory(path, kvs)
        return tuple(tiers), self._model(lambda: measure_device(self._adapter.device))

    def _directory(self, path: Path, kvs: Sequence[ChunkKV]) -> Iterable[Tier]:
        self._step(f"reading from {path}")
        name = directory_tier(path)
        return measure_directory(path, kvs, self._pinned, name, f"{name} (cold)")

    @property
    def _pinned(self) -> bool:
        return self._adapter.device.type == "cuda"

    def _bearable(self, lengths: Sequence[int]) -> list[int]:
        """Lengths whose prefill does not take too long, the shortest at any rate."""
        bearable, took_s = [], 0.0
        for tokens in lengths:
            self._step(f"prefill of {tokens} tokens")
            if took_s > LONG_S / 2:  # the next is twice as long, and takes more than twice the time
                continue
            took_s = self._model(partial(self._times.stock, tokens)).total_s
            bearable.append(tokens)
        return bearable

    def _shapes(self, longest: int) -> tuple[Shape, Shape]:
        """A long prompt and one half as long."""
        chunk = min(self._chunk_tokens, max(8, (longest - FRESH) // 4))
        chunks = max(2, (longest - FRESH) // chunk)
        return Shape(chunks, chunk, FRESH), Shape(max(1, chunks // 2), chunk, FRESH)

    def _jobs(self, lengths: Sequence[int], shapes: Sequence[Shape]) -> dict[Any, _Job]:
        """By what they measure; blended ones by policy, ratio and shape."""
        jobs: dict[Any, _Job] = {
            ("prefill", n): _Job(f"prefill of {n} tokens", partial(self._times.stock, n))
            for n in lengths
        }
        asked = [("random", ratio, shape) for shape in shapes for ratio in RATIOS]
        asked += [("query", 0.0, shape) for shape in self._asking(shapes)]
        asked += [(policy, USUAL_RATIO, shape) for policy in EXTRAS for shape in shapes]
        for policy, ratio, shape in asked:
            what = f"{policy} at ratio {ratio:g} over {shape.tokens} tokens"
            run = partial(self._times.blended, shape, policy, ratio)
            jobs[policy, ratio, shape] = _Job(what, run)
        return jobs

    def _in_rounds(self, jobs: dict[Any, _Job]) -> dict[Any, Timed]:
        """Every job once a round, so that what disturbs the machine for a while disturbs all alike. The
        first round warms up; long ones are fewer."""
        runs: dict[Any, list[Timed]] = {key: [] for key in jobs}
        began = time.monotonic()
        for number in range(ROUNDS):
            if number > 1 and (time.monotonic() - began) * (number + 1) / number > ROUNDS_S:
                break
            for key, job in jobs.items():
                self._step(job.what)
                runs[key].append(self._model(job.run))
        return {key: usual(timed[1:] or timed) for key, timed in runs.items()}

    def _asking(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Prompts whose fresh tokens ask what the others are worth."""
        return [self._fitting(replace(s, fresh=fresh)) for s in shapes for fresh in QUESTIONS]

    def _fitting(self, shape: Shape) -> Shape:
        over = shape.tokens - self._times.longest
        return shape if over <= 0 else replace(shape, fresh=max(1, shape.fresh - over))

    # -- what was measured --------------------------------------------------------------------------

    def _layer_points(self, found: Found, shapes: Sequence[Shape]) -> list[Point]:
        return [
            s.point(
                round(r * s.candidates), s.candidates, self._each(found["random", r, s].passes[0])
            )
            for s in shapes
            for r in RATIOS
        ]

    def _scout_points(self, found: Found, shapes: Sequence[Shape]) -> list[Point]:
        return [
            s.point(0, s.candidates, self._each(found["query", 0.0, s].passes[0]))
            for s in self._asking(shapes)
        ]

    def _each(self, seconds: float) -> float:
        """Of one layer."""
        return seconds / self._layers

    def _outside(self, found: Found, shapes: Sequence[Shape]) -> float:
        """What a usual blended prefill takes outside of its layers."""
        return statistics.median(found["random", r, s].outside_s for s in shapes for r in RATIOS)

    def _extras(self, found: Found, shapes: Sequence[Shape], layer: Curve) -> tuple[float, float]:
        """What looking and shifting cost on top, by token: what is left of whole runs' times."""
        looking, shifting = [], []
        for shape in shapes:
            rows = shape.point(round(USUAL_RATIO * shape.candidates), shape.candidates, 0.0)
            whole = shape.point(shape.candidates, 0.0, 0.0)
            plain = found["random", USUAL_RATIO, shape].passes[0]
            # layer 0 is computed whole there, and is not moved to its place
            entry = layer(*whole[:3]) - layer(*rows[:3])
            left = found[LOOKS, USUAL_RATIO, shape].passes[0] - plain - entry
            looking.append(left / shape.tokens)
            left = found[SHIFTS, USUAL_RATIO, shape].passes[0] - plain
            shifting.append(left / (max(1, self._layers - 1) * shape.candidates))
        return max(0.0, statistics.fmean(looking)), max(0.0, statistics.fmean(shifting))

    # -- on the worker ----------------------------------------------------------------------------

    def _model(self, call: Callable[[], T]) -> T:
        def locked() -> T:
            with self._adapter.lock:
                return call()

        return self._run(locked)

    def _layer_bytes(self) -> list[int]:
        layout = self._adapter.layout.encoded(self._encoding)
        return [stored_layer_bytes(layout, i, self._chunk_tokens) for i in range(self._layers)]


def directory_tier(path: Path) -> str:
    """The name of a directory's tier."""
    return str(path.expanduser().resolve())
