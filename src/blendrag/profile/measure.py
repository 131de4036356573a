"""One profile, step by step, each short, so that whoever waits can be told how far it is.

Nothing is kept here: a profile is whole when all steps are done, or is not at all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from blendrag.estimates import Conditions, Curve, Profile, Tier
from blendrag.estimates.curve import Point, fit
from blendrag.fusor import Fusor
from blendrag.kv import ChunkKV
from blendrag.model.adapter import ModelAdapter
from blendrag.profile.model_times import SHORTEST, ModelTimes, Shape, Timed
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


class Runner(Protocol):
    """Runs work where the model's work is done, and waits for it."""

    def __call__(self, call: Callable[[], T], /) -> T: ...


@dataclass
class _Found:
    """What the steps done so far have measured."""

    prefill: list[Point] = field(default_factory=list)
    layer: list[Point] = field(default_factory=list)
    scout: list[Point] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    peek_s: float = 0.0
    shift_s: float = 0.0
    tiers: list[Tier] = field(default_factory=list)
    device_bytes_per_s: float | None = None


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
        began, found = time.monotonic(), _Found()
        lengths = [n for n in LENGTHS if n <= self._times.longest] or [SHORTEST]
        self._begin(len(lengths) + 2 * len(RATIOS) + 2 * len(QUESTIONS) + 2 + 3 + len(directories))
        self._read(found, root, directories)
        longest = self._prefill(found, lengths)
        shapes = self._shapes(longest)
        self._blend(found, shapes)
        self._ask(found, shapes)
        layer, scout = fit(found.layer), fit(found.scout)
        self._extras(found, shapes[0], layer)
        return Profile(
            conditions=conditions,
            prefill=fit(found.prefill),
            layer=layer,
            scout=scout,
            peek_s=found.peek_s,
            shift_s=found.shift_s,
            fixed_s=statistics.median(found.outside),
            tiers=tuple(found.tiers),
            device_bytes_per_s=found.device_bytes_per_s,
            is_shared=self._adapter.device.type == "cpu" and torch.get_num_threads() >= cores(),
            chunk_tokens=self._chunk_tokens,
            layer_bytes=tuple(self._layer_bytes()),
            took_s=time.monotonic() - began,
            measured=_points(found),
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

    def _read(self, found: _Found, root: Path, directories: Sequence[Path]) -> None:
        kvs = self._chunks()
        self._step("reading from memory")
        found.tiers.append(measure_memory(kvs, self._pinned))
        self._step("reading from disk")
        found.tiers += measure_directory(root, kvs, self._pinned)
        for path in directories:
            found.tiers += self._directory(path, kvs)
        found.device_bytes_per_s = self._model(lambda: measure_device(self._adapter.device))

    def _directory(self, path: Path, kvs: Sequence[ChunkKV]) -> Iterable[Tier]:
        self._step(f"reading from {path}")
        name = directory_tier(path)
        return measure_directory(path, kvs, self._pinned, name, f"{name} (cold)")

    @property
    def _pinned(self) -> bool:
        return self._adapter.device.type == "cuda"

    def _prefill(self, found: _Found, lengths: Sequence[int]) -> int:
        """Stock prefills, the shortest first; the longest length that did not take too long."""
        longest, took_s = lengths[0], 0.0
        for tokens in lengths:
            self._step(f"prefill of {tokens} tokens")
            if took_s > LONG_S / 2:  # the next is twice as long, and takes more than twice the time
                continue
            timed = self._model(partial(self._times.stock, tokens))
            took_s, longest = timed.total_s, tokens
            found.prefill.append(Point(tokens, tokens / 2, 0, took_s))
        return longest

    def _shapes(self, longest: int) -> tuple[Shape, Shape]:
        """A long prompt and one half as long."""
        chunk = min(self._chunk_tokens, max(8, (longest - FRESH) // 4))
        chunks = max(2, (longest - FRESH) // chunk)
        return Shape(chunks, chunk, FRESH), Shape(max(1, chunks // 2), chunk, FRESH)

    def _blend(self, found: _Found, shapes: Iterable[Shape]) -> None:
        for shape in shapes:
            for ratio in RATIOS:
                self._step(f"blending {shape.tokens} tokens at ratio {ratio:g}")
                timed = self._blended(shape, "random", ratio)
                chosen = round(ratio * shape.candidates)
                each = timed.passes[0] / self._layers
                found.layer.append(shape.point(chosen, shape.candidates, each))
                found.outside.append(timed.outside_s)

    def _ask(self, found: _Found, shapes: Iterable[Shape]) -> None:
        for shape in shapes:
            for fresh in QUESTIONS:
                self._step(f"scouting {shape.tokens} tokens with {fresh}")
                asked = self._fitting(replace(shape, fresh=fresh))
                timed = self._blended(asked, "query", 0.0)
                each = timed.passes[0] / self._layers
                found.scout.append(asked.point(0, asked.candidates, each))

    def _fitting(self, shape: Shape) -> Shape:
        over = shape.tokens - self._times.longest
        return shape if over <= 0 else replace(shape, fresh=max(1, shape.fresh - over))

    def _extras(self, found: _Found, shape: Shape, layer: Curve) -> None:
        """What looking and shifting cost on top, as what is left of a whole run's time."""
        chosen = round(USUAL_RATIO * shape.candidates)
        placed = float(shape.candidates)
        self._step("peeking")
        looked = self._blended(shape, "hkvd", USUAL_RATIO)
        rows = shape.point(chosen, placed, 0.0)
        whole = shape.point(placed, 0.0, 0.0)
        expected = layer(whole.rows, whole.context) + (self._layers - 1) * layer(*rows[:3])
        found.peek_s = max(0.0, looked.passes[0] - expected) / shape.tokens
        self._step("shifting")
        shifted = self._blended(shape, "offset+random", USUAL_RATIO)
        plain = self._blended(shape, "random", USUAL_RATIO)
        left = shifted.passes[0] - plain.passes[0]
        found.shift_s = max(0.0, left) / (max(1, self._layers - 1) * shape.candidates)

    # -- on the worker ----------------------------------------------------------------------------

    def _model(self, call: Callable[[], T]) -> T:
        def locked() -> T:
            with self._adapter.lock:
                return call()

        return self._run(locked)

    def _blended(self, shape: Shape, policy: str, ratio: float) -> Timed:
        def timed() -> Timed:
            return self._times.blended(shape, self._times.chunk(shape.chunk_tokens), policy, ratio)

        return self._model(timed)

    def _layer_bytes(self) -> list[int]:
        layout = self._adapter.layout.encoded(self._encoding)
        return [stored_layer_bytes(layout, i, self._chunk_tokens) for i in range(self._layers)]


def directory_tier(path: Path) -> str:
    """The name of a directory's tier."""
    return str(path.expanduser().resolve())


def _points(found: _Found) -> dict[str, Any]:
    return {
        "prefill": [list(p) for p in found.prefill],
        "layer": [list(p) for p in found.layer],
        "scout": [list(p) for p in found.scout],
        "outside_s": found.outside,
    }
