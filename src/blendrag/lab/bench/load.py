"""Load: first tokens under Poisson arrivals over a skewed corpus, full, prefix and blend beside each other.

Every request is answered by all three, one after the other, so that what disturbs the machine disturbs
all alike; only first tokens are computed. From the times each took follows what a queue before one model
does at any rate (:mod:`blendrag.lab.bench.queue`), the arrivals being the same for all three.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from blendrag.errors import InvalidInputError
from blendrag.lab.bench.load_servers import BlendServer, FullServer, PrefixServer, Served, Server
from blendrag.lab.bench.queue import Queue
from blendrag.lab.bench.tiers import BenchTier, tier_store
from blendrag.lab.bench.workload import Workload, check
from blendrag.model import ModelAdapter
from blendrag.store.payload import frame
from blendrag.text.prompt import PromptPlan, Segment

#: Request rates in the table, as shares of what full prefill can answer at most.
RATES = (0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class LoadWorkload:
    """Requests of ``prompt.chunks`` chunks each, out of a corpus that is asked for by Zipf's law."""

    prompt: Workload
    corpus_chunks: int = 100
    store_chunks: int = 100
    """Room in ``prefix``'s cache and in ``blend``'s store, in files of chunks as the model computes them."""
    skew: float = 1.0
    """The chunk of rank k is asked for in proportion to k to the power of -skew."""
    requests: int = 60
    warm_requests: int = 20
    """Answered first, to fill what is kept, and not counted."""
    seed: int = 0


@dataclass(frozen=True)
class RateRow:
    """One way at one rate; milliseconds from arrival to first token."""

    way: str
    requests_per_s: float
    of_full: float
    """The rate as a share of what full prefill can answer at most."""
    mean_ttft_ms: float
    p95_ttft_ms: float
    throughput_per_s: float


@dataclass(frozen=True)
class WayResult:
    """One way, whatever the rate."""

    way: str
    service_ms: float
    """Median to the first token, without waiting."""
    busy_ms: float
    """Mean of the same: what a request keeps the model from the next."""
    reused: float
    """Share of prompt tokens whose KV was there."""
    equal_ttft_per_s: float
    """The rate at which its mean TTFT is what full prefill's has doubled to."""


@dataclass(frozen=True)
class LoadResult:
    """One run."""

    model: str
    tier: str
    encoding: str
    policy: str
    ratio: float
    limit_bytes: int
    full_doubles_per_s: float
    """The rate at which full prefill's mean TTFT is twice what it is without load."""
    doubled_ttft_ms: float
    blend_rate_ratio: float
    """Blend's rate at that TTFT over full prefill's."""
    prefix_rate_ratio: float
    ways: tuple[WayResult, ...]
    rows: tuple[RateRow, ...]
    requests: int


# -- the requests -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requests:
    """What is asked of all three ways."""

    corpus: tuple[tuple[int, ...], ...]
    """Ids of its chunks, those asked for most first."""
    plans: tuple[PromptPlan, ...]
    """In order, those that warm up first."""


def make_requests(adapter: ModelAdapter, workload: LoadWorkload) -> Requests:
    """A corpus, and prompts over it. Raises :class:`InvalidInputError`."""
    prompt = workload.prompt
    _check(adapter, workload)
    vocab = adapter.model.get_input_embeddings().num_embeddings
    rng = np.random.default_rng(workload.seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(2, vocab, count).tolist())

    corpus = [ids(prompt.chunk_tokens) for _ in range(workload.corpus_chunks)]
    weights = np.arange(1, len(corpus) + 1, dtype=float) ** -workload.skew
    weights /= weights.sum()
    plans = []
    for _ in range(workload.warm_requests + workload.requests):
        chosen = rng.choice(len(corpus), prompt.chunks, replace=False, p=weights)
        segments = [
            Segment("", corpus[c], i * prompt.chunk_tokens, f"chunk-{c}", corpus[c])
            for i, c in enumerate(chosen)
        ]
        at = prompt.chunks * prompt.chunk_tokens
        plans.append(PromptPlan((*segments, Segment("", ids(prompt.question_tokens), at))))
    return Requests(tuple(corpus), tuple(plans))


def _check(adapter: ModelAdapter, workload: LoadWorkload) -> None:
    prompt = workload.prompt
    if workload.corpus_chunks < prompt.chunks:
        raise InvalidInputError(
            f"a corpus of {workload.corpus_chunks} chunks cannot fill prompts of {prompt.chunks}; make it "
            "larger (--corpus-chunks)"
        )
    if workload.store_chunks <= prompt.chunks:
        raise InvalidInputError(
            f"room for {workload.store_chunks} chunks holds no more than one prompt of {prompt.chunks}; "
            "allow more (--store-chunks)"
        )
    if not 0.0 <= workload.skew < float("inf"):
        raise InvalidInputError(f"skew {workload.skew}: expected a number of 0 or more")
    check(adapter, prompt)


# -- the run ------------------------------------------------------------------------------------------


@torch.inference_mode()
def run_load(
    adapter: ModelAdapter,
    workload: LoadWorkload,
    tier: BenchTier,
    tick: Callable[[str], None] = lambda text: None,
) -> LoadResult:
    """Answer every request in every way, then compute the queues."""
    adapter.require_blendable()
    requests = make_requests(adapter, workload)
    plans = requests.plans
    limit = workload.store_chunks * frame(adapter.layout, workload.prompt.chunk_tokens).file_bytes
    with tier_store(tier, limit) as there:
        blend = BlendServer(adapter, there, workload.prompt)
        tick(f"encoding the corpus of {len(requests.corpus)} chunks")
        blend.ingest(_shuffled(requests.corpus, workload.seed))
        servers: dict[str, Server] = {
            "full": FullServer(adapter),
            "prefix": PrefixServer(adapter, limit),
            "blend": blend,
        }
        served: dict[str, list[Served]] = {name: [] for name in servers}
        for number, plan in enumerate(plans):
            tick(f"request {number + 1} of {len(plans)}")
            for name, server in servers.items():
                served[name].append(server.serve(plan))
            there.settle()
    counted = {name: each[workload.warm_requests :] for name, each in served.items()}
    return _result(adapter, workload, tier, limit, counted)


def _shuffled(corpus: Sequence[tuple[int, ...]], seed: int) -> list[tuple[int, ...]]:
    """In an order that knows nothing of what will be asked for."""
    order = np.random.default_rng(seed + 1).permutation(len(corpus))
    return [corpus[i] for i in order]


def _result(
    adapter: ModelAdapter,
    workload: LoadWorkload,
    tier: BenchTier,
    limit: int,
    served: dict[str, list[Served]],
) -> LoadResult:
    queues = {name: Queue(each, workload.seed) for name, each in served.items()}
    full = queues["full"]
    doubled_s = 2 * full.alone_s
    equal = {name: queue.rate_of(doubled_s) for name, queue in queues.items()}
    prompt = workload.prompt
    tokens = prompt.chunks * prompt.chunk_tokens + prompt.question_tokens
    ways = tuple(
        WayResult(
            name,
            1e3 * statistics.median(s.first_s for s in each),
            1e3 * queues[name].alone_s,
            statistics.fmean(s.reused_tokens for s in each) / tokens,
            equal[name],
        )
        for name, each in served.items()
    )
    rows = tuple(
        _row(name, queue, share / full.alone_s, share)
        for share in RATES
        for name, queue in queues.items()
    )
    return LoadResult(
        model=adapter.model_id,
        tier=tier.name,
        encoding=prompt.encoding,
        policy=prompt.policy,
        ratio=prompt.ratio,
        limit_bytes=limit,
        full_doubles_per_s=equal["full"],
        doubled_ttft_ms=1e3 * doubled_s,
        blend_rate_ratio=equal["blend"] / equal["full"],
        prefix_rate_ratio=equal["prefix"] / equal["full"],
        ways=ways,
        rows=rows,
        requests=workload.requests,
    )


def _row(name: str, queue: Queue, rate: float, share: float) -> RateRow:
    ttfts, throughput = queue.at(rate)
    p95 = float(np.quantile(ttfts, 0.95))
    return RateRow(name, rate, share, 1e3 * statistics.fmean(ttfts), 1e3 * p95, throughput)
