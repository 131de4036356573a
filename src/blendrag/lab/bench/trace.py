"""One request, layer by layer, as a timeline; and how much of its loading hides behind its computing.

The overlap is measured, not read off the timeline: one and the same request is run whole, loading only
and computing only (its KV in place before the clock starts), in interleaved rounds. With their medians,
overlap = 1 − (wall − max(load, compute)) / min(load, compute): 1 where the shorter of the two is hidden
whole, 0 where they come one after the other. The timeline is of one more run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from blendrag.fusor import Fusion
from blendrag.fusor.loader import LayerLoader
from blendrag.lab.bench.tiers import ON_DISK, BenchTier, TierStore, parse_tier, tier_store
from blendrag.lab.bench.ttft import TtftBench
from blendrag.lab.bench.workload import NEW_TOKENS, Workload
from blendrag.metrics import LOAD, Span, Timeline
from blendrag.model import ModelAdapter

#: The tier that is throttled so that loading takes as long as computing.
BALANCED = "balanced"
#: Beyond this ratio of the two, their overlap says little.
COMPARABLE = 2.0


@dataclass(frozen=True)
class TraceResult:
    """One request; medians over the rounds, each thing timed alone where it says so."""

    model: str
    device: str
    tier: str
    encoding: str
    policy: str
    schedule: str
    prompt_tokens: int
    ratio: float
    wall_ms: float
    """The whole request, from opening its chunks to its first token."""
    load_ms: float
    """Opening and reading alone."""
    compute_ms: float
    """Everything else alone, all KV in place."""
    overlap: float
    comparable: bool
    """Whether loading and computing, each alone, are within a factor of two of each other."""
    kv_bytes: int
    spread_ms: dict[str, tuple[float, float]]
    rounds: int
    spans: tuple[Span, ...]

    @property
    def bound_ms(self) -> float:
        """The longer of loading and computing: no request is faster that needs both."""
        return max(self.load_ms, self.compute_ms)

    @property
    def bound_share(self) -> float:
        """Bound over wall: 1 where the request takes no longer than it must."""
        return self.bound_ms / self.wall_ms

    def as_dict(self) -> dict[str, Any]:
        """All of it, what follows from the rest included."""
        return {**asdict(self), "bound_ms": self.bound_ms, "bound_share": self.bound_share}


def overlap(wall: float, load: float, compute: float) -> float:
    """1 − (wall − max(load, compute)) / min(load, compute); above 1 only by noise."""
    return 1 - (wall - max(load, compute)) / min(load, compute)


class Pieces:
    """One request whole, and each of its two parts alone; every way returns its seconds."""

    def __init__(self, bench: TtftBench) -> None:
        self._bench = bench

    def wall(self, timeline: Timeline | None = None) -> float:
        """As :meth:`TtftBench.blend` runs it."""
        bench = self._bench
        began = self._now()
        with bench.opened() as load:
            request = bench.request(load, bench.workload.policy, bench.workload.ratio)
            logits, _, _ = bench.fusor.prefill(bench.ids, request, NEW_TOKENS, timeline=timeline)
            int(logits[0, -1].argmax())
        return self._now() - began

    def load(self) -> float:
        """The layers that this request reads, into buffers such as its own."""
        bench = self._bench
        reads = self._reads  # before the clock starts
        cache = bench.fusor.new_cache(bench.prompt_tokens, NEW_TOKENS)
        buffers = cache.buffers(bench.prompt_tokens)
        began = self._now()
        with bench.opened() as load:
            loader = LayerLoader(buffers, [load.spans if r else [] for r in reads])
            loader.start()
            try:
                for layer in range(len(buffers)):
                    loader.synchronize(layer)
                return self._now() - began
            finally:
                loader.close()

    def compute(self) -> float:
        """The same prefill over KV that is in place when the clock starts."""
        bench = self._bench
        with bench.opened() as load:
            request = bench.request(load, bench.workload.policy, bench.workload.ratio)
            cache = bench.fusor.new_cache(bench.prompt_tokens, NEW_TOKENS)
            alone = bench.fusor.fuse(cache, request, last_row_only=True)
            with bench.adapter.lock, alone as fusion:
                _in_place(fusion, len(cache.layers))
                began = self._now()
                out = bench.adapter.model(
                    input_ids=bench.ids, past_key_values=cache, use_cache=True, logits_to_keep=1
                )
                int(out.logits[0, -1].argmax())
                return self._now() - began

    @cached_property
    def _reads(self) -> list[bool]:
        """By layer, whether this request reads it: a policy that looks computes layer 0 whole."""
        timeline = Timeline()
        self.wall(timeline)
        read = {span.layer for span in timeline.spans if span.what == LOAD}
        return [layer in read for layer in range(len(self._bench.adapter.layout.layers))]

    def _now(self) -> float:
        if self._bench.adapter.device.type == "cuda":
            torch.cuda.synchronize(self._bench.adapter.device)
        return time.perf_counter()


def _in_place(fusion: Fusion, layers: int) -> None:
    """Wait for all layers, their copies to the device included."""
    for layer in range(layers):
        fusion.loader.synchronize(layer)


@torch.inference_mode()
def run_trace(
    adapter: ModelAdapter,
    workload: Workload,
    tier: str,
    tick: Callable[[str], None] = lambda text: None,
) -> TraceResult:
    """Measure one request from ``tier``: a name, a throughput, or :data:`BALANCED`."""
    wanted = _balanced(adapter, workload, tick) if tier == BALANCED else parse_tier(tier)
    with tier_store(wanted) as there:
        tick("encoding the chunks")
        bench = TtftBench(adapter, workload, there.store)
        return _measure(bench, there, tick)


def _balanced(adapter: ModelAdapter, workload: Workload, tick: Callable[[str], None]) -> BenchTier:
    """A disk from which loading takes as long as computing does here and now."""
    tick("measuring how long computing takes")
    with tier_store(ON_DISK) as there:
        bench = TtftBench(adapter, workload, there.store)
        pieces = Pieces(bench)
        pieces.wall()
        seconds = statistics.median(pieces.compute() for _ in range(workload.rounds))
        return parse_tier(f"{bench.kv_bytes / seconds / 1e6:.4g}MB/s")


def _measure(bench: TtftBench, there: TierStore, tick: Callable[[str], None]) -> TraceResult:
    workload, pieces = bench.workload, Pieces(bench)
    ways: dict[str, Callable[[], float]] = {
        "wall": pieces.wall,
        "load": pieces.load,
        "compute": pieces.compute,
    }
    tick("warming up")
    for way in ways.values():
        way()
    there.settle()
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(workload.rounds):
        tick(f"round {number + 1} of {workload.rounds}")
        for name, way in ways.items():
            there.prepare()
            samples[name].append(1e3 * way())
    there.prepare()
    timeline = Timeline()
    pieces.wall(timeline)
    wall, load, compute = (statistics.median(samples[n]) for n in ("wall", "load", "compute"))
    return TraceResult(
        model=bench.adapter.model_id,
        device=str(bench.adapter.device),
        tier=there.tier.name,
        encoding=workload.encoding,
        policy=workload.policy,
        schedule=workload.schedule,
        prompt_tokens=bench.prompt_tokens,
        ratio=workload.ratio,
        wall_ms=wall,
        load_ms=load,
        compute_ms=compute,
        overlap=overlap(wall, load, compute),
        comparable=max(load, compute) <= COMPARABLE * min(load, compute),
        kv_bytes=bench.kv_bytes,
        spread_ms={name: (min(found), max(found)) for name, found in samples.items()},
        rounds=workload.rounds,
        spans=tuple(timeline.all_spans()),
    )


# -- for viewers of traces ----------------------------------------------------------------------


def chrome_trace(result: TraceResult) -> dict[str, Any]:
    """Trace events as Chrome (``about:tracing``) and Perfetto open them; times in microseconds."""
    lanes = {"loader": 1, "model": 2}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
        for name, tid in lanes.items()
    ]
    for span in result.spans:
        events.append(
            {
                "ph": "X",
                "name": f"{span.what} {span.layer}",
                "cat": f"{span.pass_name},{span.what}".strip(","),
                "pid": 1,
                "tid": lanes["loader" if span.what == LOAD else "model"],
                "ts": 1e6 * span.began_s,
                "dur": 1e6 * span.seconds,
                "args": {"layer": span.layer, "pass": span.pass_name or "blend"},
            }
        )
    about = {k: v for k, v in result.as_dict().items() if k != "spans"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def write_trace(path: Path, result: TraceResult) -> None:
    """Write :func:`chrome_trace` into ``path``."""
    path.write_text(json.dumps(chrome_trace(result)), encoding="utf-8")
