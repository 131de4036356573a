"""``blendrag bench load``: TTFT under Poisson arrivals over a skewed corpus, for full, prefix and blend.

All three ways answer every request, one after the other; only first tokens are computed. The queue before
one model is then computed from these times, for any rate and with equal arrivals for all ways.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, cycle, islice, takewhile
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
import typer

from blendrag.errors import InvalidInputError
from blendrag.fusor import Fusor
from blendrag.fusor.loader import LoadedSpan
from blendrag.model import ModelAdapter
from blendrag.planning.plan import MissingKV
from blendrag.store.kv import ChunkKV
from blendrag.store.memory import MemoryStore
from blendrag.store.payload import frame
from blendrag.text.prompt import Segment, SegmentedPrompt
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.rounds import Tick, clock, silent
from blendrag_lab.bench.tiers import parse_tier, tier_store
from blendrag_lab.bench.workload import (
    NEW_TOKENS,
    BlendResult,
    StoredChunks,
    Workload,
    conditions,
    exact_request,
    prompt_of,
    random_ids,
    stock_prefill,
)
from blendrag_lab.figure_styles import log_scale, styles
from blendrag_lab.plots import GREY, Series, draw, legend, panels, title
from blendrag_lab.tables import ResultTable, figure, times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Request rates in the table, as shares of the highest rate that full prefill can answer.
RATES = (0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 3.0, 4.0, 6.0)
#: Arrivals in a computed queue; the measured requests repeat in their order.
ARRIVALS = 2000


@dataclass(frozen=True)
class RateRow:
    """One way at one rate; milliseconds from arrival to first token."""

    way: str
    requests_per_s: float
    mean_ttft_ms: float
    p95_ttft_ms: float
    throughput_per_s: float


@dataclass(frozen=True)
class WayResult:
    way: str
    service_ms: float
    """Median TTFT without waiting."""
    reused: float
    """Share of prompt tokens whose KV was stored or cached."""
    equal_ttft_per_s: float
    """The rate at which its mean TTFT is twice full prefill's TTFT without load."""


@dataclass(frozen=True, kw_only=True)
class LoadResult(BlendResult):
    limit_bytes: int
    doubled_ttft_ms: float
    ways: tuple[WayResult, ...]
    rows: tuple[RateRow, ...]
    requests: int


def load_table(result: LoadResult) -> ResultTable:
    rate = {way.way: way.equal_ttft_per_s for way in result.ways}
    found = {(row.requests_per_s, row.way): row for row in result.rows}

    def cell(row: RateRow) -> str:
        return (
            f"{figure(row.mean_ttft_ms)} ({figure(row.p95_ttft_ms)}), {row.throughput_per_s:.3g}/s"
        )

    ways = (
        f"{way.way}: {figure(way.service_ms)} ms without load, {way.reused:.0%} of the tokens reused, "
        f"{way.equal_ttft_per_s:.3g} requests/s at a TTFT of {figure(result.doubled_ttft_ms)} ms."
        for way in result.ways
    )
    return ResultTable(
        ("requests/s", *(f"{name}: mean TTFT ms (p95), first tokens/s" for name in rate)),
        [
            (f"{per_s:.3g}", *(cell(found[per_s, name]) for name in rate))
            for per_s in dict.fromkeys(row.requests_per_s for row in result.rows)
        ],
        f"{result.requests} requests, room for {result.limit_bytes / 1e6:,.0f} MB: {result.about}",
        [
            *ways,
            f"At the rate where full prefill's TTFT has doubled, blend sustains "
            f"{times(rate['blend'] / rate['full'])} that rate, prefix "
            f"{times(rate['prefix'] / rate['full'])}.",
        ],
    )


def load_figure(result: LoadResult) -> Figure:
    """Mean TTFT by request rate with its 95th percentile, and the TTFT at which the ways are compared."""
    figure, (axes,) = panels(1)
    known = styles(each.way for each in result.ways)
    lines = []
    for way in (each.way for each in result.ways):
        rows = [row for row in result.rows if row.way == way]
        mean, p95 = [row.mean_ttft_ms for row in rows], [row.p95_ttft_ms for row in rows]
        lines.append(Series(way, known[way], [row.requests_per_s for row in rows], mean, mean, p95))
    draw(axes, lines)
    axes.axhline(
        result.doubled_ttft_ms, color=GREY, linestyle=":", label="twice full's\nwithout load"
    )
    axes.set(xlabel="requests per second", ylabel="mean milliseconds to the first token")
    log_scale(axes, "x")
    log_scale(axes)
    title(
        axes,
        f"{result.model}, {result.requests} requests\n{result.policy} at r = {result.ratio:g}, "
        f"{result.encoding} KV from {result.tier}",
    )
    legend(figure, [axes])
    return figure


def make_requests(
    adapter: ModelAdapter, prompt: Workload, corpus_chunks: int, requests: int
) -> tuple[list[tuple[int, ...]], list[SegmentedPrompt]]:
    """Ids of a corpus's chunks, the most requested first; and prompts over it, drawn by Zipf's law."""
    ids, rng = random_ids(adapter), np.random.default_rng(0)
    corpus = [ids(prompt.chunk_tokens) for _ in range(corpus_chunks)]
    weights = 1 / np.arange(1, len(corpus) + 1)
    weights /= weights.sum()
    plans = []
    for _ in range(requests):
        chosen = rng.choice(len(corpus), prompt.chunks, replace=False, p=weights)
        chunks = ((f"chunk-{c}", corpus[c]) for c in chosen)
        plans.append(prompt_of(chunks, ids(prompt.question_tokens)))
    return corpus, plans


@dataclass(frozen=True)
class PrefilledRequest:
    """One request: its first token, seconds to it, and prompt tokens whose KV was there."""

    token: int
    first_s: float
    reused_tokens: int


def serve_full(adapter: ModelAdapter, plan: SegmentedPrompt) -> PrefilledRequest:
    ids = torch.tensor([plan.ids], device=adapter.device)  # [1, N]
    began = clock(adapter.device)
    token = stock_prefill(adapter, ids)
    return PrefilledRequest(token, clock(adapter.device) - began, 0)


class PrefixServer:
    """Idealised prefix caching: KV of whole chunks after exactly the chunks before them, in memory.

    Least recently used chunks are evicted. Adding KV to the cache costs no time.
    """

    def __init__(self, adapter: ModelAdapter, limit_bytes: int) -> None:
        self._adapter = adapter
        self._fusor = Fusor(adapter)
        self._known = MemoryStore(limit_bytes)

    def serve(self, plan: SegmentedPrompt) -> PrefilledRequest:
        adapter, tokens = self._adapter, len(plan.ids)
        ids = torch.tensor([plan.ids], device=adapter.device)  # [1, N]
        names = accumulate(
            (str(segment.chunk_id) for segment in plan.chunks),
            lambda before, name: f"{before} {name}",
        )
        chunks = list(zip(plan.chunks, names, strict=True))  # each named after all chunks up to it
        began = clock(adapter.device)
        known = list(takewhile(lambda pair: self._known.contains("", pair[1]), chunks))
        # The last chunk first: it is useless without those before it, so it must be evicted first.
        spans = tuple(self._span(segment, name) for segment, name in reversed(known))[::-1]
        logits, cache, _ = self._fusor.prefill(ids, exact_request(tokens, spans), NEW_TOKENS)
        token = int(logits[0, -1].argmax())
        first_s = clock(adapter.device) - began
        for span in spans:
            span.reader.close()
        for segment, name in reversed(chunks[len(known) :]):
            buffers = cache.buffers(tokens)
            layers = tuple(b[:, :, segment.position : segment.end].cpu() for b in buffers)
            self._known.put("", name, ChunkKV(adapter.layout, len(segment.ids), layers))
        return PrefilledRequest(token, first_s, sum(span.tokens for span in spans))

    def _span(self, segment: Segment, name: str) -> LoadedSpan:
        reader = self._known.open("", name, self._adapter.layout, len(segment.ids))
        assert reader is not None
        return LoadedSpan(segment.position, segment.end, reader, segment.position, exact=True)


class BlendServer(StoredChunks):
    """A KV store of limited size. Missing chunks are encoded and stored before the answer."""

    def serve(self, plan: SegmentedPrompt) -> PrefilledRequest:
        device = self.adapter.device
        ids = torch.tensor([plan.ids], device=device)  # [1, N]
        self.there.prepare()
        began = clock(device)
        controller = replace(self.controller)  # one for each request, as in an engine
        encoded: list[tuple[int, ...]] = []

        def encode(missing: Sequence[MissingKV]) -> int:
            encoded.extend(each.ids for each in missing)
            self.put(encoded)
            return len(encoded)

        # Not opened(): a store that is too small may have evicted a chunk of this very prompt.
        planned = controller.plan(plan, "blend", self.blending(), encode=encode)
        with closing(planned) as opened:
            token, _ = self.prefill(ids, opened.request(len(plan.ids)))
            first_s = clock(device) - began
        return PrefilledRequest(token, first_s, opened.reused_tokens - sum(map(len, encoded)))


class Queue:
    """One worker that answers in order: open-loop arrivals with exponential gaps, and measured times."""

    def __init__(self, served: Sequence[PrefilledRequest], seed: int = 0) -> None:
        self._served = list(islice(cycle(served), ARRIVALS))
        self._gaps = np.random.default_rng(seed).exponential(size=ARRIVALS)
        self.alone_s = statistics.fmean(s.first_s for s in served)

    def at(self, rate: float) -> tuple[list[float], float]:
        """Seconds from arrival to first token of every request at ``rate`` per second; the throughput."""
        arrived = free = 0.0
        found = []
        for gap, served in zip(self._gaps, self._served, strict=True):
            arrived += gap / rate
            free = max(arrived, free) + served.first_s
            found.append(free - arrived)
        return found, len(found) / free

    def mean(self, rate: float) -> float:
        return statistics.fmean(self.at(rate)[0])

    def rate_of(self, ttft_s: float) -> float:
        """The highest rate with a mean TTFT of at most ``ttft_s``; 0 if there is none."""
        if self.alone_s > ttft_s:
            return 0.0
        low, high = 0.0, 4.0 / self.alone_s
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.mean(middle) <= ttft_s else (low, middle)
        return low


@options.bench(load_table, load_figure, rounds=options.OMIT)
@torch.inference_mode()
def load(
    timed: TimedModel,
    prompt: Workload,
    requests: options.Count = 60,
    warm_requests: Annotated[
        int, typer.Option(min=0, help="Answered first to fill cache and store; not counted.")
    ] = 20,
    corpus_chunks: options.Count = 100,
    store_chunks: Annotated[
        int, typer.Option(min=1, help="Room of the prefix cache and of the KV store, in chunks.")
    ] = 100,
    tier: options.Tier = "disk",
    tick: Tick = silent,
) -> LoadResult:
    wanted, adapter = parse_tier(tier), timed.adapter
    if corpus_chunks < prompt.chunks:
        raise InvalidInputError(
            f"a corpus of {corpus_chunks} chunks cannot fill prompts of {prompt.chunks}; make it larger "
            "(--corpus-chunks)"
        )
    if store_chunks <= prompt.chunks:
        raise InvalidInputError(
            f"room for {store_chunks} chunks holds no more than one prompt of {prompt.chunks}; allow more "
            "(--store-chunks)"
        )
    prompt.check(adapter)
    adapter.require_blendable()
    corpus, plans = make_requests(adapter, prompt, corpus_chunks, warm_requests + requests)
    limit = store_chunks * frame(adapter.layout, prompt.chunk_tokens).file_bytes
    with tier_store(wanted, limit) as there:
        blend = BlendServer(adapter, prompt, there)
        tick(f"encoding the corpus of {len(corpus)} chunks")
        # In random order: which chunks a small store keeps does not depend on the requests.
        order = np.random.default_rng(1).permutation(len(corpus))
        blend.put(corpus[i] for i in order)
        servers: dict[str, Callable[[SegmentedPrompt], PrefilledRequest]] = {
            "full": partial(serve_full, adapter),
            "prefix": PrefixServer(adapter, limit).serve,
            "blend": blend.serve,
        }
        served: dict[str, list[PrefilledRequest]] = {name: [] for name in servers}
        for number, plan in enumerate(plans):
            tick(f"request {number + 1} of {len(plans)}")
            for name, serve in servers.items():
                served[name].append(serve(plan))
    counted = {name: each[warm_requests:] for name, each in served.items()}
    queues = {name: Queue(each) for name, each in counted.items()}
    full_s = queues["full"].alone_s
    return LoadResult(
        **conditions(adapter, replace(prompt, rounds=1), tier),
        limit_bytes=limit,
        doubled_ttft_ms=2e3 * full_s,
        ways=tuple(
            WayResult(
                way=name,
                service_ms=1e3 * statistics.median(s.first_s for s in each),
                reused=statistics.fmean(s.reused_tokens for s in each) / prompt.prompt_tokens,
                equal_ttft_per_s=queues[name].rate_of(2 * full_s),
            )
            for name, each in counted.items()
        ),
        rows=tuple(
            _row(name, queue, share / full_s) for share in RATES for name, queue in queues.items()
        ),
        requests=requests,
    )


def _row(name: str, queue: Queue, rate: float) -> RateRow:
    ttfts, throughput = queue.at(rate)
    p95 = float(np.quantile(ttfts, 0.95))
    return RateRow(name, rate, 1e3 * statistics.fmean(ttfts), 1e3 * p95, throughput)
