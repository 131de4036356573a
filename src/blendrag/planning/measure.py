"""Measures a machine profile, step by step: reading from each tier, stock prefills, blended prefills.

Every prefill is a whole ``generate`` of one token, as a request runs it, with the clock read where its
decoder layers begin and end. Blended ones run over KV that is in place before the clock starts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from blendrag.errors import InvalidInputError
from blendrag.fusor import BlendRequest, Fusor
from blendrag.fusor.gate import HeldKV
from blendrag.fusor.loader import LoadedSpan
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.model.adapter import ModelAdapter
from blendrag.model.sharing import in_this_thread
from blendrag.planning.profile import Conditions, Curve, Profile, Tier, cores
from blendrag.planning.tier_times import (
    directory_tiers,
    measure_device,
    measure_directory,
    measure_memory,
    measure_store,
)
from blendrag.store.encodings import stored_layer_bytes
from blendrag.store.kv import ChunkKV

T = TypeVar("T")
#: Called before every step: what it is, how many are done, and of how many.
Watch = Callable[[str, int, int], None]

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
#: Shortest prompt that is timed, of a model that takes no longer one.
SHORTEST = 64
#: No length is timed after one that takes this long, but at least so many lengths are.
LONG_S, LEAST_LENGTHS = 2.0, 2
#: With no more lengths than these the quadratic term of the prefill is taken from the layers.
FEW = 3
#: Every prefill is timed so often; fewer times, but at least so often, if that takes longer than this.
ROUNDS, LEAST_ROUNDS, ROUNDS_S = 6, 4, 75.0

RATIOS = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)
USUAL_RATIO = 0.15
FRESH = 24
#: Fresh tokens of the scout passes that are timed.
QUESTIONS = (16, 64, 256)
#: A policy that needs deviations, which cost more than its rows.
DEVIATION_POLICY = "hkvd"
#: A policy whose scout pass runs through all layers.
SCOUT_POLICY = "blend"
#: The longest prompt is so many times as long as the longest stock prefill, up to so many tokens: requests
#: compute few rows that see many keys.
FAR, FAR_TOKENS = 6, 8192


class Runner(Protocol):
    """Runs work where the model's work is done, and waits for it."""

    def __call__(self, call: Callable[[], T], /) -> T: ...


class Point(NamedTuple):
    """One measurement: ``rows`` that see ``context`` keys on average, ``placed`` loaded tokens moved."""

    rows: float
    context: float
    placed: float
    seconds: float


@dataclass(frozen=True)
class Timed:
    """One prefill: seconds of its passes through the layers, of the last layer in each, and outside."""

    passes: tuple[float, ...]
    lasts: tuple[float, ...]
    outside_s: float

    @property
    def total_s(self) -> float:
        return sum(self.passes) + self.outside_s


@dataclass(frozen=True)
class Shape:
    """A prompt to time: equal chunks, then ``fresh`` tokens."""

    chunks: int
    chunk_tokens: int
    fresh: int

    @property
    def candidates(self) -> int:
        return self.chunks * self.chunk_tokens

    @property
    def tokens(self) -> int:
        return self.candidates + self.fresh

    def point(self, chosen: float, placed: float, seconds: float) -> Point:
        """Of the fresh tokens and ``chosen`` ones spread over the chunks."""
        rows = self.fresh + chosen
        fresh_keys = self.fresh * (self.candidates + (self.fresh + 1) / 2)
        chosen_keys = chosen * (self.candidates + 1) / 2
        return Point(rows, (fresh_keys + chosen_keys) / rows, placed, seconds)


@dataclass(frozen=True)
class Job:
    """One prefill to time, several times."""

    what: str
    run: Callable[[], Timed]


Key = tuple[str, float, Shape] | tuple[str, int]
"""A blended prefill's policy, ratio and prompt; or ``"prefill"`` and a length."""


class Measure:
    """Measures one model over one store. ``run`` is the engine's worker, ``watch`` a display."""

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
        self._layout = adapter.layout.encoded(encoding)
        self._chunk_tokens = min(chunk_tokens, self._times.longest // 4)
        self._run = run
        self._watch = watch
        self._layers = len(adapter.layout.layers)
        self._pinned = adapter.device.type == "cuda"
        self._done = self._steps = 0

    def profile(
        self, conditions: Conditions, root: Path | None, directories: Sequence[Path] = ()
    ) -> Profile:
        """Measure everything: tiers of the store at ``root`` (``None``: it cannot be written) and of
        ``directories``, then the model. Takes half a minute for a small model, two for a large one."""
        began = time.monotonic()
        lengths = [n for n in LENGTHS if n <= self._times.longest] or [SHORTEST]
        timed = ROUNDS * len(self._prefills(lengths).jobs())
        self._begin(2 + (root is not None) + len(directories) + len(lengths) + timed)
        kvs = self._chunks()
        self._step("reading from memory")
        tiers = [measure_memory(kvs, self._pinned)]
        if root is not None:
            self._step("reading from disk")
            tiers += measure_store(root, kvs, self._pinned)
        tiers += self._directory_tiers(directories, kvs)
        device_bytes_per_s = self._model(lambda: measure_device(self._adapter.device))
        prefills = self._prefills(self._bearable(lengths))
        found = Figures(prefills, self._in_rounds(prefills.jobs()))
        layer = fit(found.layers())
        return Profile(
            conditions=conditions,
            prefill=found.prefill_curve(layer),
            layer=layer,
            last=fit(found.lasts()),
            scout=fit(found.scouts()),
            peek_s=found.peek_s(layer),
            fixed_s=found.outside_s(),
            tiers=tuple(tiers),
            device_bytes_per_s=device_bytes_per_s,
            is_shared=self._adapter.device.type == "cpu" and conditions.threads >= self._run(cores),
            chunk_tokens=self._chunk_tokens,
            layer_bytes=tuple(
                stored_layer_bytes(self._layout, i, self._chunk_tokens) for i in range(self._layers)
            ),
            took_s=time.monotonic() - began,
        )

    def directories(self, directories: Sequence[Path]) -> list[Tier]:
        """Only the tiers of ``directories``."""
        self._begin(1 + len(directories))
        return self._directory_tiers(directories, self._chunks())

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
        return [replace(kv, layout=self._layout) for kv in made]

    def _directory_tiers(self, directories: Sequence[Path], kvs: Sequence[ChunkKV]) -> list[Tier]:
        tiers: list[Tier] = []
        for path in directories:
            self._step(f"reading from {path}")
            tiers += measure_directory(path, kvs, self._pinned, *directory_tiers(path))
        return tiers

    def _bearable(self, lengths: Sequence[int]) -> list[int]:
        """Lengths whose prefill does not take too long, and at least the shortest ones."""
        bearable: list[int] = []
        took_s = 0.0
        for tokens in lengths:
            self._step(f"prefill of {tokens} tokens")
            # the next is twice as long and takes more than twice the time
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
        """The median of each job, timed once a round so that a disturbance hits all alike.

        The first round warms up."""
        runs: dict[Key, list[Timed]] = {key: [] for key in jobs}
        began = time.monotonic()
        for number in range(ROUNDS):
            expected_s = (time.monotonic() - began) * (number + 1) / max(number, 1)
            if number >= LEAST_ROUNDS and expected_s > ROUNDS_S:
                break
            for key, job in jobs.items():
                self._step(job.what)
                runs[key].append(self._model(job.run))
        return {key: median(timed[1:] or timed) for key, timed in runs.items()}

    def _model(self, call: Callable[[], T]) -> T:
        """On the worker, with the model's lock."""

        def locked() -> T:
            with self._adapter.lock:
                return call()

        return self._run(locked)


# -- which prefills are timed, and what their times say -------------------------------------------


class Prefills:
    """Stock prefills of ``lengths``; blended ones over two prompts of such lengths at any ratio, and over a
    far longer prompt at ratios that compute no more tokens than the longest stock prefill."""

    def __init__(
        self, times: ModelTimes, layers: int, chunk_tokens: int, lengths: Sequence[int]
    ) -> None:
        self._times = times
        self.layers = layers
        self.lengths = tuple(lengths)
        longest = lengths[-1]
        chunk = min(chunk_tokens, max(8, (longest - FRESH) // 4))
        chunks = max(2, (longest - FRESH) // chunk)
        self.shapes = (Shape(chunks, chunk, FRESH), Shape(max(1, chunks // 2), chunk, FRESH))
        far_tokens = min(FAR * longest, FAR_TOKENS, times.longest) - FRESH
        far = Shape(max(1, far_tokens // chunk_tokens), chunk_tokens, FRESH)
        self.random = [(ratio, shape) for shape in self.shapes for ratio in RATIOS]
        if far.tokens > self.shapes[0].tokens:
            self.random += [(r, far) for r in RATIOS if FRESH + r * far.candidates <= longest]
        longer = sorted({shape for _, shape in self.random}, key=lambda shape: -shape.tokens)[:2]
        self.scouted = [self._fitting(replace(s, fresh=n)) for s in longer for n in QUESTIONS]

    def jobs(self) -> dict[Key, Job]:
        """All of them, by what they measure."""
        jobs: dict[Key, Job] = {
            ("prefill", n): Job(f"prefill of {n} tokens", partial(self._times.stock, n))
            for n in self.lengths
        }
        blended = [("random", ratio, shape) for ratio, shape in self.random]
        blended += [(SCOUT_POLICY, 0.0, shape) for shape in self.scouted]
        blended += [(DEVIATION_POLICY, USUAL_RATIO, shape) for shape in self.shapes]
        for policy, ratio, shape in blended:
            what = f"{policy} at ratio {ratio:g} over {shape.tokens} tokens"
            run = partial(self._times.blended, shape, policy, ratio)
            jobs[policy, ratio, shape] = Job(what, run)
        return jobs

    def _fitting(self, shape: Shape) -> Shape:
        over = shape.tokens - self._times.longest
        return shape if over <= 0 else replace(shape, fresh=max(1, shape.fresh - over))


@dataclass(frozen=True)
class Figures:
    """Times of all prefills, and the figures that follow from them."""

    of: Prefills
    timed: Mapping[Key, Timed]

    def prefills(self) -> list[Point]:
        return [Point(n, n / 2, 0, self.timed["prefill", n].total_s) for n in self.of.lengths]

    def prefill_curve(self, layer: Curve) -> Curve:
        """Of a stock prefill. A few lengths do not separate what is linear in the length from what is
        quadratic; the latter is then taken from the layers."""
        points = self.prefills()
        return fit(points, self.of.layers * layer.pair_s if len(points) <= FEW else None)

    def layers(self) -> list[Point]:
        """Of the layers before the last, or the only one."""
        points = []
        for ratio, shape in self.of.random:
            timed = self.timed["random", ratio, shape]
            before_s = timed.passes[0] - timed.lasts[0]
            each = before_s / (self.of.layers - 1) if self.of.layers > 1 else timed.lasts[0]
            points.append(_random_point(ratio, shape, each))
        return points

    def lasts(self) -> list[Point]:
        """Of the last layer."""
        return [_random_point(r, s, self.timed["random", r, s].lasts[0]) for r, s in self.of.random]

    def scouts(self) -> list[Point]:
        """Of one layer of a scout pass."""
        return [
            s.point(0, s.candidates, self.timed[SCOUT_POLICY, 0.0, s].passes[0] / self.of.layers)
            for s in self.of.scouted
        ]

    def outside_s(self) -> float:
        """What a usual blended prefill takes outside of its layers."""
        return statistics.median(self.timed["random", r, s].outside_s for r, s in self.of.random)

    def peek_s(self, layer: Curve) -> float:
        """Per token, what deviations cost beyond the rows computed for them."""
        costs = []
        for shape in self.of.shapes:
            rows = shape.point(round(USUAL_RATIO * shape.candidates), shape.candidates, 0.0)
            whole = shape.point(shape.candidates, 0.0, 0.0)
            plain = self.timed["random", USUAL_RATIO, shape].passes[0]
            # layer 0 is computed whole there, and its KV is not moved
            entry = layer(*whole[:3]) - layer(*rows[:3])
            left = self.timed[DEVIATION_POLICY, USUAL_RATIO, shape].passes[0] - plain - entry
            costs.append(left / shape.tokens)
        return max(0.0, statistics.fmean(costs))


def _random_point(ratio: float, shape: Shape, seconds: float) -> Point:
    return shape.point(round(ratio * shape.candidates), shape.candidates, seconds)


# -- timing one prefill ---------------------------------------------------------------------------


class ModelTimes:
    """Times prefills of one model. The caller holds the model's lock."""

    def __init__(self, adapter: ModelAdapter, fusor: Fusor, prefix_ids: Sequence[int]) -> None:
        self._adapter = adapter
        self._fusor = fusor
        self._prefix_ids = tuple(prefix_ids)
        self._kv: dict[int, ChunkKV] = {}
        self._begins: list[float] = []
        self._lasts: list[float] = []
        self._ends: list[float] = []

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that can be blended and answered with one token."""
        limit = min(
            self._adapter.context_tokens,
            self._adapter.blend_limit_tokens or self._adapter.context_tokens,
        )
        longest = limit - len(self._prefix_ids) - 2
        if longest < SHORTEST:
            raise InvalidInputError(
                f"{self._adapter.model_id} takes prompts of {longest} tokens behind the corpus's prefix, "
                f"expected {SHORTEST} or more to measure; use a shorter prefix or a model of a longer context"
            )
        return longest

    def chunk(self, tokens: int) -> ChunkKV:
        """KV of a chunk of random ids behind the corpus's prefix, the same for the same length."""
        if tokens not in self._kv:
            ids = self._ids(tokens)[0].tolist()
            self._kv[tokens] = self._adapter.encode(self._prefix_ids, ids)
        return self._kv[tokens]

    def stock(self, tokens: int) -> Timed:
        """A stock prefill and its first token."""
        ids = self._ids(tokens)
        return self._timed(lambda: self._generate_s(ids))

    def blended(self, shape: Shape, policy: str, ratio: float) -> Timed:
        """A blended prefill over KV that is loaded before the clock starts."""
        kv, at, ids = self.chunk(shape.chunk_tokens), len(self._prefix_ids), self._ids(shape.tokens)
        spans = tuple(
            LoadedSpan(i * kv.tokens, (i + 1) * kv.tokens, HeldKV(kv), at, exact=False)
            for i in range(shape.chunks)
        )
        constant = Schedule.parse("constant")
        request = BlendRequest(shape.tokens, spans, make_policy(policy), constant, ratio)

        def run() -> float:
            began = time.perf_counter()
            cache = self._fusor.new_cache(shape.tokens, 1)
            with self._fusor.fuse(cache, request, last_row_only=True) as fusion:
                prepared_s = time.perf_counter() - began
                fusion.loader.synchronize(len(self._adapter.layout.layers) - 1)
                return prepared_s + self._generate_s(ids, past_key_values=cache)

        return self._timed(run)

    def _ids(self, tokens: int) -> torch.Tensor:
        vocab = self._adapter.model.get_input_embeddings().num_embeddings
        generator = torch.Generator().manual_seed(tokens)
        return torch.randint(0, vocab, (1, tokens), generator=generator).to(self._adapter.device)

    def _generate_s(self, ids: torch.Tensor, **more: Any) -> float:
        """Seconds of ``generate`` to its first token."""
        began = self._now()
        self._adapter.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            do_sample=False,
            pad_token_id=0,
            **more,
        )
        return self._now() - began

    def _now(self) -> float:
        if self._adapter.device.type == "cuda":
            torch.cuda.synchronize(self._adapter.device)
        return time.perf_counter()

    def _timed(self, run: Callable[[], float]) -> Timed:
        with self._watched(), torch.inference_mode():
            total_s = run()
        passes = tuple(end - at for at, end in zip(self._begins, self._ends, strict=True))
        lasts = tuple(end - at for at, end in zip(self._lasts, self._ends, strict=True))
        return Timed(passes, lasts, max(0.0, total_s - sum(passes)))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Note when each pass enters the first layer, and enters and leaves the last."""
        self._begins, self._lasts, self._ends = [], [], []
        first, last = self._adapter.decoder_layers[0], self._adapter.decoder_layers[-1]

        def noting(times: list[float]) -> Any:
            return in_this_thread(lambda *_: times.append(self._now()))

        handles = [
            first.register_forward_pre_hook(noting(self._begins)),
            last.register_forward_pre_hook(noting(self._lasts)),
            last.register_forward_hook(noting(self._ends)),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def median(runs: Sequence[Timed]) -> Timed:
    """Of several runs of one prefill."""
    passes = tuple(map(statistics.median, zip(*(run.passes for run in runs), strict=True)))
    lasts = tuple(map(statistics.median, zip(*(run.lasts for run in runs), strict=True)))
    return Timed(passes, lasts, statistics.median(run.outside_s for run in runs))


# -- fitting --------------------------------------------------------------------------------------


def fit(points: Iterable[Point], pair_s: float | None = None) -> Curve:
    """The curve through ``points``: no term negative, errors relative to the time.

    Non-negative least squares give the linear terms, ``pair_s`` too unless it is given; what they leave is
    made monotone over the rows (isotonic regression). Points of a single row count are taken as proportional
    to it. Raises :class:`InvalidInputError` without points.
    """
    import numpy as np
    from scipy.optimize import isotonic_regression, nnls

    known = [p for p in points if p.seconds > 0 and p.rows > 0]
    if not known:
        raise InvalidInputError("no time was measured, expected at least one; measure again")
    pairs = np.array([p.rows * p.context for p in known])
    seconds = np.array([p.seconds for p in known])
    target = np.ones(len(known))
    if pair_s is not None:  # at most half of every time
        pair_s = min(pair_s, float((seconds / 2 / np.maximum(pairs, 1e-12)).min()))
        target -= pair_s * pairs / seconds
        pairs = np.zeros(len(known))
    terms = np.array([[1.0, p.rows, pair, p.placed] for p, pair in zip(known, pairs, strict=True)])
    scale = np.maximum(terms.max(axis=0), 1e-12)
    found, _ = nnls(terms / scale / seconds[:, None], target)
    _, row_s, own_pair_s, placed_s = (float(x) for x in found / scale)
    pair_s = own_pair_s if pair_s is None else pair_s
    rest: dict[float, list[float]] = {}
    for p in sorted(known):
        left = p.seconds - pair_s * p.rows * p.context - placed_s * p.placed
        rest.setdefault(p.rows, []).append(left)
    smooth = np.maximum(isotonic_regression([statistics.fmean(v) for v in rest.values()]).x, 1e-9)
    if len(rest) == 1:
        row_s = float(smooth[0]) / next(iter(rest))
    return Curve(tuple(rest), tuple(float(x) for x in smooth), row_s, pair_s, placed_s)
