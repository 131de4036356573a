"""Measures a machine profile, step by step: reading from each tier, stock prefills, blended prefills.

Every prefill is a whole ``generate`` of one token, as a request runs it, with the clock read where its
decoder layers begin and end. Blended ones run over KV that is in place before the clock starts.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from blendrag.errors import InvalidInputError
from blendrag.fusor import BlendRequest, Fusor
from blendrag.fusor.loader import HeldKV, LoadedSpan
from blendrag.fusor.selection import Blending
from blendrag.model.adapter import ModelAdapter
from blendrag.model.sharing import only_here
from blendrag.planning.machine import cores
from blendrag.planning.profile import COLD, DISK, Conditions, Curve, Profile, Tier
from blendrag.planning.tier_times import (
    measure_device,
    measure_directory,
    measure_memory,
    measure_remote,
)
from blendrag.store.encodings import stored_bytes_by_layer
from blendrag.store.kv import ChunkKV
from blendrag.store.remote.tier import RemoteTier

#: Called before every step: what it is, how many are done, and of how many.
Watch = Callable[[str, int, int], None]

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
#: Shortest prompt that is timed, of a model that takes no longer one.
MIN_PROMPT_TOKENS = 64
#: No length is timed after one that takes this long, but at least so many lengths are.
MAX_PREFILL_S, MIN_LENGTHS = 2.0, 2
#: With no more lengths than these the quadratic term of the prefill is taken from the layers.
MAX_LENGTHS_WITHOUT_PAIR_TERM = 3
#: How often every prefill is timed, and the least if that takes longer than this.
ROUNDS, MIN_ROUNDS, MAX_ROUNDS_S = 6, 4, 75.0

RATIOS = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)
USUAL_RATIO = 0.15
FRESH_TOKENS = 24
#: Fresh tokens of the scout passes that are timed.
SCOUTED_FRESH_TOKENS = (16, 64, 256)
STOCK = "prefill"
#: Policies that recompute rows and nothing else, that need deviations, and whose scout pass runs through all
#: layers.
PLAIN_POLICY, DEVIATION_POLICY, SCOUT_POLICY = "random", "hkvd", "blend"
#: Policies that differ in that the second moves what it does not recompute.
STAYING_POLICY, MOVING_POLICY = "query", "query+shift"
#: The longest prompt, in longest stock prefills and in tokens: requests compute few rows that see many keys.
FAR_PROMPT_LENGTHS, MAX_FAR_TOKENS = 6, 8192


#: Tokens and seconds of the prefill that tells how fast this machine computes, where nothing was measured.
TIMED_TOKENS, MOST_TIMED_TOKENS, TIMED_S = 32, 1024, 0.1


def prefill_token_s(adapter: ModelAdapter) -> float:
    """Seconds to compute a token, about: of a prefill that is not so short that it only reads the weights.

    The caller holds the lock.
    """
    vocabulary = adapter.model.get_input_embeddings().num_embeddings
    most = min(MOST_TIMED_TOKENS, adapter.encoded_alike())
    ids = [7 * i % vocabulary for i in range(most)]

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        adapter.encode((), ids[:tokens])
        return time.perf_counter() - began

    tokens = min(TIMED_TOKENS, most)
    seconds(tokens)  # warms up
    while (found := seconds(tokens)) < TIMED_S and 2 * tokens <= most:
        tokens *= 2
    return min(found, seconds(tokens)) / tokens


class Measure:
    """Measures one model over one store. ``run(call)`` calls it on the scheduler's thread."""

    def __init__(
        self,
        adapter: ModelAdapter,
        fusor: Fusor,
        encoding: str,
        prefix_ids: Sequence[int],
        chunk_tokens: int,
        run: Callable[[Callable[[], Any]], Any],
        watch: Watch,
        earlier: TimedRounds | None = None,
        keep: Callable[[TimedRounds], None] = lambda rounds: None,
    ) -> None:
        """``earlier``: rounds of a measurement that ended early, with which this one goes on; ``keep`` is
        called with all rounds after each."""
        self._earlier, self._keep = earlier, keep
        self._adapter = adapter
        self._times = ModelTimes(adapter, fusor, prefix_ids)
        self._layout = adapter.layout.encoded(encoding)
        self._chunk_tokens = min(chunk_tokens, self._times.longest // 4)
        self._run, self._watch = run, watch
        self._pinned = adapter.device.type == "cuda"
        self._done = self._steps = 0

    def profile(
        self, conditions: Conditions, root: Path | None, directories: Sequence[Path] = ()
    ) -> Profile:
        """Tiers of the store at ``root`` (``None``: it cannot be written) and of ``directories``, then the
        model. Takes half a minute for a small model, two for a large one."""
        began = time.monotonic()
        device, longest, chunk = self._adapter.device, self._times.longest, self._chunk_tokens
        lengths = [n for n in LENGTHS if n <= longest] or [MIN_PROMPT_TOKENS]
        timed = ROUNDS * len(prefills_to_time(lengths, longest, chunk))
        self._steps = 2 + (root is not None) + len(directories) + len(lengths) + timed
        kvs = self._chunks()
        self._step("reading from memory")
        tiers = [measure_memory(kvs, self._pinned)]
        if root is not None:
            self._step("reading from disk")
            tiers += measure_directory(root, kvs, self._pinned, (DISK, COLD))
        tiers += self._directory_tiers(directories, kvs)
        if (earlier := self._earlier) is not None and not earlier.fits(lengths, longest, chunk):
            self._earlier = earlier = None  # damaged, or of another version
        bearable = self.bearable(lengths) if earlier is None else earlier.lengths
        prefills = prefills_to_time(bearable, longest, chunk)
        layers = len(self._layout.layers)
        return Profile(
            conditions=conditions,
            **figures(self._in_rounds(bearable, prefills), layers),
            tiers=tuple(tiers),
            device_bytes_per_s=self._run(partial(measure_device, device)),
            is_shared=device.type == "cpu" and conditions.threads >= self._run(cores),
            chunk_tokens=chunk,
            layer_bytes=stored_bytes_by_layer(self._layout, chunk),
            took_s=time.monotonic() - began,
        )

    def directories(self, directories: Sequence[Path]) -> list[Tier]:
        self._steps = 1 + len(directories)
        return self._directory_tiers(directories, self._chunks())

    def remote(self, remote: RemoteTier) -> Tier:
        """Raises :class:`StoreError` if the remote does not answer in time."""
        self._steps = self._done + 2
        kvs = self._chunks()
        self._step("reading from the remote")
        return measure_remote(remote, kvs, self._pinned)

    def _step(self, what: str) -> None:
        self._watch(what, self._done, self._steps)
        self._done += 1

    def _chunks(self) -> list[ChunkKV]:
        """A long chunk and a short one, as the store keeps them."""
        self._step("encoding a chunk")
        lengths = (self._chunk_tokens, max(8, self._chunk_tokens // 8))
        encoded = [self._run(partial(self._times.chunk, n)) for n in lengths]
        return [replace(kv, layout=self._layout) for kv in encoded]

    def _directory_tiers(self, directories: Sequence[Path], kvs: Sequence[ChunkKV]) -> list[Tier]:
        tiers: list[Tier] = []
        for path in directories:
            self._step(f"reading from {path}")
            tiers += measure_directory(path, kvs, self._pinned)
        return tiers

    def _time(self, prefill: PromptToTime) -> Timed:
        return cast(Timed, self._run(partial(self._times.time, prefill)))

    def bearable(self, lengths: Sequence[int]) -> list[int]:
        """Lengths whose prefill does not take too long, and at least the shortest ones."""
        bearable: list[int] = []
        took_s = 0.0
        for tokens in lengths:
            stock = PromptToTime(STOCK, tokens)
            self._step(str(stock))
            # the next is twice as long and takes more than twice the time
            if len(bearable) < MIN_LENGTHS or took_s <= MAX_PREFILL_S / 2:
                if not bearable:
                    self._time(stock)  # warms up
                took_s = self._time(stock).total_s
                bearable.append(tokens)
        return bearable

    def _in_rounds(
        self, lengths: Sequence[int], prefills: Sequence[PromptToTime]
    ) -> dict[PromptToTime, Timed]:
        """The median of each prefill, timed once a round so that a disturbance affects all alike.

        The first round warms up."""
        rounds = list(self._earlier.rounds) if self._earlier is not None else []
        began = time.monotonic()
        for here, number in enumerate(range(len(rounds), ROUNDS)):
            round_s = (time.monotonic() - began) / max(here, 1)
            if number >= MIN_ROUNDS and round_s * (number + 1) > MAX_ROUNDS_S:
                break
            bearable = max(MIN_ROUNDS, int(MAX_ROUNDS_S / round_s)) if here else ROUNDS
            self._steps = self._done + (min(ROUNDS, bearable) - number) * len(prefills)
            timed = []
            for prefill in prefills:
                self._step(str(prefill))
                timed.append(self._time(prefill))
            rounds.append(tuple(timed))
            self._keep(TimedRounds(tuple(lengths), tuple(rounds)))
        by_prefill = zip(prefills, zip(*rounds, strict=True), strict=True)
        return {prefill: median(timed[1:] or timed) for prefill, timed in by_prefill}


# -- which prefills are timed, and what their times say -------------------------------------------


class Point(NamedTuple):
    """One measurement: ``rows`` that see ``context`` keys on average, ``placed`` loaded tokens moved."""

    rows: float
    context: float
    placed: float
    seconds: float


@dataclass(frozen=True)
class PromptToTime:
    """A prompt to time: equal chunks whose KV is loaded, then ``fresh`` tokens."""

    policy: str
    """:data:`STOCK` for a stock prefill."""
    fresh: int
    chunks: int = 0
    chunk_tokens: int = 0
    ratio: float = 0.0

    @property
    def candidates(self) -> int:
        return self.chunks * self.chunk_tokens

    @property
    def tokens(self) -> int:
        return self.candidates + self.fresh

    def point(self, seconds: float, chosen: float | None = None) -> Point:
        """The point of the fresh tokens and ``chosen`` ones spread over chunks; default: by the ratio."""
        chosen = round(self.ratio * self.candidates) if chosen is None else chosen
        rows = self.fresh + chosen
        fresh_keys = self.fresh * (self.candidates + (self.fresh + 1) / 2)
        chosen_keys = chosen * (self.candidates + 1) / 2
        return Point(rows, (fresh_keys + chosen_keys) / rows, self.candidates, seconds)

    def __str__(self) -> str:
        if self.policy == STOCK:
            return f"prefill of {self.tokens} tokens"
        return f"{self.policy} at ratio {self.ratio:g} over {self.tokens} tokens"


def prefills_to_time(lengths: Sequence[int], longest: int, chunk_tokens: int) -> list[PromptToTime]:
    """Stock prefills of ``lengths``; blended ones over two such prompts at any ratio, and over a far longer
    one at ratios that compute no more tokens. No prompt exceeds ``longest``."""
    most = lengths[-1]
    chunk = min(chunk_tokens, max(8, (most - FRESH_TOKENS) // 4))
    chunks = max(2, (most - FRESH_TOKENS) // chunk)
    far_chunks = max(
        1, (min(FAR_PROMPT_LENGTHS * most, MAX_FAR_TOKENS, longest) - FRESH_TOKENS) // chunk_tokens
    )
    prompts = [
        PromptToTime(PLAIN_POLICY, FRESH_TOKENS, n, chunk) for n in (chunks, max(1, chunks // 2))
    ]
    plain = [replace(prompt, ratio=ratio) for prompt in prompts for ratio in RATIOS]
    far = PromptToTime(PLAIN_POLICY, FRESH_TOKENS, far_chunks, chunk_tokens)
    if far.tokens > prompts[0].tokens:
        prompts.insert(0, far)
        plain += [
            replace(far, ratio=r) for r in RATIOS if FRESH_TOKENS + r * far.candidates <= most
        ]
    scouts = [
        replace(prompt, policy=SCOUT_POLICY, fresh=max(1, min(n, longest - prompt.candidates)))
        for prompt in prompts[:2]
        for n in SCOUTED_FRESH_TOKENS
    ]
    peeks = [replace(each, policy=DEVIATION_POLICY, ratio=USUAL_RATIO) for each in prompts[-2:]]
    shifts = [
        replace(prompts[-2], policy=policy, ratio=USUAL_RATIO)
        for policy in (STAYING_POLICY, MOVING_POLICY)
    ]
    return [*(PromptToTime(STOCK, n) for n in lengths), *plain, *scouts, *peeks, *shifts]


class Timed(NamedTuple):
    """Seconds of a prefill: first pass through the layers, last layer in it, outside of them, all."""

    first_pass_s: float
    last_layer_s: float
    outside_s: float
    total_s: float


@dataclass(frozen=True)
class TimedRounds:
    """Rounds of a measurement: the lengths of stock prefills, and the times of each round's prefills."""

    lengths: tuple[int, ...]
    rounds: tuple[tuple[Timed, ...], ...]

    def fits(self, lengths: Sequence[int], longest: int, chunk_tokens: int) -> bool:
        """Whether a measurement with these ``lengths`` to choose from can go on with these rounds."""
        count = len(self.lengths)
        if count < min(MIN_LENGTHS, len(lengths)) or self.lengths != tuple(lengths[:count]):
            return False
        prefills = prefills_to_time(self.lengths, longest, chunk_tokens)
        return all(len(timed) == len(prefills) for timed in self.rounds)


def median(runs: Sequence[Timed]) -> Timed:
    return Timed(*map(statistics.median, zip(*runs, strict=True)))


def figures(timed: Mapping[PromptToTime, Timed], layers: int) -> dict[str, Any]:
    """The fields of a :class:`Profile` that follow from the times of a model's prefills."""
    by_policy: dict[str, list[tuple[PromptToTime, Timed]]] = defaultdict(list)
    for prefill, times in timed.items():
        by_policy[prefill.policy].append((prefill, times))
    stock, plain = by_policy[STOCK], by_policy[PLAIN_POLICY]
    last = fit(p.point(t.last_layer_s) for p, t in plain)
    layer = last
    if layers > 1:
        layer = fit(p.point((t.first_pass_s - t.last_layer_s) / (layers - 1)) for p, t in plain)
    # A few lengths do not separate what is linear in the length from what is quadratic.
    pair_s = layers * layer.pair_s if len(stock) <= MAX_LENGTHS_WITHOUT_PAIR_TERM else None
    peeks = [
        _peek_s(prefill, times, timed[replace(prefill, policy=PLAIN_POLICY)], layer)
        for prefill, times in by_policy[DEVIATION_POLICY]
    ]
    ((moving, moving_times),) = by_policy[MOVING_POLICY]
    shift_s = moving_times.total_s - timed[replace(moving, policy=STAYING_POLICY)].total_s
    return {
        "prefill": fit((Point(p.tokens, p.tokens / 2, 0, t.total_s) for p, t in stock), pair_s),
        "layer": layer,
        "last": last,
        "scout": fit(p.point(t.first_pass_s / layers) for p, t in by_policy[SCOUT_POLICY]),
        "peek_s": max(0.0, statistics.fmean(peeks)),
        "shift_s": max(0.0, shift_s) / (max(1, layers - 1) * moving.candidates),
        "fixed_s": statistics.median(times.outside_s for _, times in plain),
    }


def _peek_s(prefill: PromptToTime, timed: Timed, plain: Timed, layer: Curve) -> float:
    """Per token, what deviations cost beyond the rows computed for them."""
    rows, context, placed, _ = prefill.point(0.0)
    all_rows, all_context, *_ = prefill.point(0.0, prefill.candidates)
    # layer 0 is computed whole there, and its KV is not moved
    entry = layer(all_rows, all_context) - layer(rows, context, placed)
    return (timed.first_pass_s - plain.first_pass_s - entry) / prefill.tokens


class ModelTimes:
    """Times prefills of one model, each with the model's lock."""

    def __init__(self, adapter: ModelAdapter, fusor: Fusor, prefix_ids: Sequence[int]) -> None:
        self._adapter, self._fusor = adapter, fusor
        self._prefix_ids = tuple(prefix_ids)
        self._kv: dict[int, ChunkKV] = {}
        self.longest = adapter.encoded_alike() - len(self._prefix_ids) - 2
        """Tokens of the longest prompt that can be blended and answered with one token."""
        if self.longest < MIN_PROMPT_TOKENS:
            raise InvalidInputError(
                f"{adapter.model_id} takes prompts of {self.longest} tokens after the corpus's prefix, "
                f"expected {MIN_PROMPT_TOKENS} or more to measure; use a shorter prefix or a model of a "
                "longer context"
            )

    def chunk(self, tokens: int) -> ChunkKV:
        """KV of a chunk of random ids after the corpus's prefix, the same for the same length."""
        if tokens not in self._kv:
            ids = self._ids(tokens)[0].tolist()
            with self._adapter.lock:
                self._kv[tokens] = self._adapter.encode(self._prefix_ids, ids)
        return self._kv[tokens]

    def time(self, prefill: PromptToTime) -> Timed:
        ids = self._ids(prefill.tokens)
        kv = self.chunk(prefill.chunk_tokens) if prefill.chunks else None  # before the clock starts
        with self._adapter.lock, torch.inference_mode(), self._watched() as times:
            total_s = self._generate_s(ids) if kv is None else self._blended_s(prefill, ids, kv)
        began_s, last_s, ended_s, *_ = times
        within_s = sum(times[2::3]) - sum(times[::3])
        outside_s = max(0.0, total_s - within_s)
        return Timed(ended_s - began_s, ended_s - last_s, outside_s, within_s + outside_s)

    def _blended_s(self, prefill: PromptToTime, ids: torch.Tensor, kv: ChunkKV) -> float:
        """Over KV that is loaded before the clock starts."""
        at = len(self._prefix_ids)
        spans = tuple(
            LoadedSpan(i * kv.tokens, (i + 1) * kv.tokens, HeldKV(kv), at, exact=False)
            for i in range(prefill.chunks)
        )
        blending = Blending.of(prefill.policy, "constant", prefill.ratio)
        request = BlendRequest(prefill.tokens, spans, blending)
        began = time.perf_counter()
        cache = self._fusor.new_cache(prefill.tokens, 1)
        with self._fusor.fuse(cache, request, last_row_only=True) as fusion:
            prepared_s = time.perf_counter() - began
            fusion.loader.synchronize(len(self._adapter.layout.layers) - 1)
            return prepared_s + self._generate_s(ids, past_key_values=cache)

    def _ids(self, tokens: int) -> torch.Tensor:
        vocab = self._adapter.model.get_input_embeddings().num_embeddings
        generator = torch.Generator().manual_seed(tokens)
        return torch.randint(0, vocab, (1, tokens), generator=generator).to(self._adapter.device)

    def _generate_s(self, ids: torch.Tensor, **more: Any) -> float:
        began = self._now()
        mask = torch.ones_like(ids)
        self._adapter.model.generate(
            ids, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0, **more
        )
        return self._now() - began

    def _now(self) -> float:
        if self._adapter.device.type == "cuda":
            torch.cuda.synchronize(self._adapter.device)
        return time.perf_counter()

    @contextmanager
    def _watched(self) -> Iterator[list[float]]:
        """Three times of each pass: when it enters the first layer, enters the last one, and leaves it."""
        times: list[float] = []
        note = only_here(lambda *_: times.append(self._now()))
        first, last = self._adapter.decoder_layers[0], self._adapter.decoder_layers[-1]
        with ExitStack() as hooks:
            hooks.callback(first.register_forward_pre_hook(note).remove)
            hooks.callback(last.register_forward_pre_hook(note).remove)
            hooks.callback(last.register_forward_hook(note).remove)
            yield times


def fit(points: Iterable[Point], pair_s: float | None = None) -> Curve:
    """The curve through ``points``: no term negative, errors relative to the time.

    Non-negative least squares give the linear terms, ``pair_s`` too unless it is given; what they leave is
    made monotone over the rows (isotonic regression). Points of a single row count are taken as proportional
    to it. Raises :class:`InvalidInputError` without points.
    """
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
    found = non_negative_least_squares(terms / scale / seconds[:, None], target)
    _, row_s, own_pair_s, placed_s = (float(x) for x in found / scale)
    pair_s = own_pair_s if pair_s is None else pair_s
    rest: dict[float, list[float]] = defaultdict(list)
    for p in sorted(known):
        rest[p.rows].append(p.seconds - pair_s * p.rows * p.context - placed_s * p.placed)
    smooth = np.maximum(isotonic_regression(map(statistics.fmean, rest.values())), 1e-9)
    if len(rest) == 1:
        row_s = float(smooth[0]) / next(iter(rest))
    return Curve(tuple(rest), tuple(float(x) for x in smooth), row_s, pair_s, placed_s)


def non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The ``x >= 0`` with the least ``|matrix @ x - target|``, for a few columns; zeros where they suffice.

    Takes the best solution that is not negative of all subsets of the columns, solved without bounds.
    """
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(np.linalg.norm(target))
    rounding = 1e-12 * least
    for count in range(1, columns + 1):
        for subset in map(list, combinations(range(columns), count)):
            found = np.linalg.lstsq(matrix[:, subset], target, rcond=None)[0]
            error = float(np.linalg.norm(matrix[:, subset] @ found - target))
            if found.min() >= 0 and error < least - rounding:
                best, least = np.zeros(columns), error
                best[subset] = found
    return best


def isotonic_regression(values: Iterable[float]) -> np.ndarray:
    """The ascending numbers nearest to ``values``: neighbours out of order become their mean."""
    pools: list[tuple[float, int]] = []  # sum and count of equal neighbours
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] >= total / count:
            before, more = pools.pop()
            total, count = total + before, count + more
        pools.append((total, count))
    return np.repeat([total / count for total, count in pools], [count for _, count in pools])
