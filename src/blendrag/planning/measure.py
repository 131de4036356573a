"""One profile, step by step, each short, so that whoever waits can be told how far it is.

Nothing is kept here: a profile is whole when all steps are done, or is not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from blendrag.fusor import Fusor
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.curve import fit
from blendrag.planning.model_times import SHORTEST, ModelTimes, Timed, usual
from blendrag.planning.prefills import Job, Key, Prefills
from blendrag.planning.profile import Conditions, Profile, Tier
from blendrag.planning.profile_record import cores
from blendrag.planning.tier_times import (
    measure_device,
    measure_directory,
    measure_memory,
    measure_store,
)
from blendrag.store.encodings import stored_layer_bytes
from blendrag.store.kv import ChunkKV

T = TypeVar("T")
#: Told before every step: what it is, how many are done, and of how many.
Watch = Callable[[str, int, int], None]

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
#: No longer prefill is timed than the first that takes as long as this; but so many lengths at least.
LONG_S, LEAST_LENGTHS = 2.0, 2
#: Every prefill is timed so often, the first time to warm up; less often, but no less than at least, where
#: that takes longer than the seconds.
ROUNDS, LEAST_ROUNDS = 6, 4
ROUNDS_S = 75.0


class Runner(Protocol):
    """Runs work where the model's work is done, and waits for it."""

    def __call__(self, call: Callable[[], T], /) -> T: ...


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
        self, conditions: Conditions, root: Path | None, directories: Sequence[Path] = ()
    ) -> Profile:
        """All of it: tiers below ``root`` (``None`` for a store that is not to be written) and in
        ``directories``, then the model. Half a minute for a small model, two minutes for a large one. Raises
        what the model, the store or a directory raises."""
        began = time.monotonic()
        lengths = [n for n in LENGTHS if n <= self._times.longest] or [SHORTEST]
        timed = ROUNDS * len(self._prefills(lengths).jobs())
        self._begin(2 + (root is not None) + len(directories) + len(lengths) + timed)
        tiers, device_bytes_per_s = self._read(root, directories)
        prefills = self._prefills(self._bearable(lengths))
        found = self._in_rounds(prefills.jobs())
        layers, lasts = prefills.layer_points(found), prefills.last_points(found)
        scouts = prefills.scout_points(found)
        layer = fit(layers)
        return Profile(
            conditions=conditions,
            prefill=prefills.prefill_curve(found, layer),
            layer=layer,
            last=fit(lasts),
            scout=fit(scouts),
            peek_s=prefills.peek_s(found, layer),
            fixed_s=prefills.outside_s(found),
            tiers=tiers,
            device_bytes_per_s=device_bytes_per_s,
            is_shared=self._adapter.device.type == "cpu" and conditions.threads >= self._run(cores),
            chunk_tokens=self._chunk_tokens,
            layer_bytes=tuple(self._layer_bytes()),
            took_s=time.monotonic() - began,
            measured={
                "prefill": [list(point) for point in prefills.prefill_points(found)],
                "layer": [list(point) for point in layers],
                "last": [list(point) for point in lasts],
                "scout": [list(point) for point in scouts],
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
        self, root: Path | None, directories: Sequence[Path]
    ) -> tuple[tuple[Tier, ...], float | None]:
        kvs = self._chunks()
        self._step("reading from memory")
        tiers = [measure_memory(kvs, self._pinned)]
        if root is not None:
            self._step("reading from disk")
            tiers += measure_store(root, kvs, self._pinned)
        for path in directories:
            tiers += self._directory(path, kvs)
        return tuple(tiers), self._model(lambda: measure_device(self._adapter.device))

    def _directory(self, path: Path, kvs: Sequence[ChunkKV]) -> Iterable[Tier]:
        self._step(f"reading from {path}")
        return measure_directory(path, kvs, self._pinned, *directory_tiers(path))

    @property
    def _pinned(self) -> bool:
        return self._adapter.device.type == "cuda"

    def _bearable(self, lengths: Sequence[int]) -> list[int]:
        """Lengths whose prefill does not take too long, and the two shortest at any rate: of one alone
        nothing could be said of longer ones."""
        bearable: list[int] = []
        took_s = 0.0
        for tokens in lengths:
            self._step(f"prefill of {tokens} tokens")
            # the next is twice as long, and takes more than twice the time
            if len(bearable) >= LEAST_LENGTHS and took_s > LONG_S / 2:
                continue
            if not bearable:
                self._stock_s(tokens)  # warms up
            took_s = self._stock_s(tokens)
            bearable.append(tokens)
        return bearable

    def _stock_s(self, tokens: int) -> float:
        return self._model(partial(self._times.stock, tokens)).total_s

    def _prefills(self, lengths: Sequence[int]) -> Prefills:
        return Prefills(self._times, self._layers, self._chunk_tokens, lengths)

    def _in_rounds(self, jobs: Mapping[Key, Job]) -> dict[Key, Timed]:
        """Every job once a round, so that what disturbs the machine for a while disturbs all alike. The
        first round warms up; long ones are fewer."""
        runs: dict[Key, list[Timed]] = {key: [] for key in jobs}
        began = time.monotonic()
        for number in range(ROUNDS):
            if (
                number >= LEAST_ROUNDS
                and (time.monotonic() - began) * (number + 1) / number > ROUNDS_S
            ):
                break
            for key, job in jobs.items():
                self._step(job.what)
                runs[key].append(self._model(job.run))
        return {key: usual(timed[1:] or timed) for key, timed in runs.items()}

    # -- on the worker ----------------------------------------------------------------------------

    def _model(self, call: Callable[[], T]) -> T:
        def locked() -> T:
            with self._adapter.lock:
                return call()

        return self._run(locked)

    def _layer_bytes(self) -> list[int]:
        layout = self._adapter.layout.encoded(self._encoding)
        return [stored_layer_bytes(layout, i, self._chunk_tokens) for i in range(self._layers)]


def directory_tiers(path: Path) -> tuple[str, str]:
    """The names of a directory's tiers, with its files in the operating system's cache and without."""
    name = str(path.expanduser().resolve())
    return name, f"{name} (cold)"


def directories_of(found: Profile) -> list[Path]:
    """Those that were measured beside the store."""
    named = [Path(tier.name) for tier in found.tiers if Path(tier.name).is_absolute()]
    cold = {directory_tiers(path)[1] for path in named}
    return [path for path in named if str(path) not in cold]
