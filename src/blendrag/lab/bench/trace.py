"""``blendrag bench trace``: the timeline of one request, and how much of its loading overlaps computing.

The overlap is measured, not read off the timeline. The same request runs whole, loading only, and computing
only (with its KV in place before the time starts), in interleaved rounds. From the medians,
overlap = 1 − (wall − max(load, compute)) / min(load, compute): 1 if the shorter one is hidden completely,
0 if they run one after the other. The timeline is of one more run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from blendrag.cli.plots import require_place
from blendrag.fusor.loader import LayerLoader
from blendrag.lab.bench import options
from blendrag.lab.bench.geometry import TimedModel
from blendrag.lab.bench.rounds import Tick, Timing, clock, run_rounds, silent
from blendrag.lab.bench.tiers import ON_DISK, BenchTier, TierStore, parse_tier
from blendrag.lab.bench.workload import (
    NEW_TOKENS,
    BlendResult,
    PromptBench,
    Workload,
    conditions,
    prompt_bench,
    stock_prefill,
)
from blendrag.lab.plots import trace_figure
from blendrag.lab.tables import ResultTable, figure
from blendrag.metrics import LOAD, Span, Timeline

#: The tier that is throttled so that loading takes as long as computing.
BALANCED = "balanced"
#: The overlap of two times says little if their ratio is larger.
COMPARABLE = 2.0


@dataclass(frozen=True, kw_only=True)
class TraceResult(BlendResult):
    """One request."""

    prompt_tokens: int
    wall_ms: Timing
    """The whole request, from opening its chunks to its first token."""
    load_ms: Timing
    """Opening and reading alone."""
    compute_ms: Timing
    """Everything else alone, with all KV in place."""
    overlap: float
    kv_bytes: int
    spans: tuple[Span, ...]


def trace_table(result: TraceResult) -> ResultTable:
    """A row for each of the three times, and their bound."""
    load, compute = result.load_ms.median, result.compute_ms.median
    bound = max(load, compute)  # no request is faster
    rows = [
        ("the request", str(result.wall_ms)),
        ("loading alone", str(result.load_ms)),
        ("computing alone", str(result.compute_ms)),
        ("bound: the longer of the two", figure(bound)),
    ]
    comparable = bound <= COMPARABLE * min(load, compute)
    hint = "" if comparable else "; one of the two is more than twice the other"
    return ResultTable(
        ("what", "ms (lowest to highest)"),
        rows,
        f"{result.prompt_tokens:,} tokens, {result.kv_bytes / 1e6:,.1f} MB of KV: {result.about}",
        [
            f"Overlap {result.overlap:.2f}{hint}. Bound over request {bound / result.wall_ms.median:.2f}."
        ],
    )


def overlap(wall: float, load: float, compute: float) -> float:
    """1 − (wall − max(load, compute)) / min(load, compute); more than 1 only by noise."""
    return 1 - (wall - max(load, compute)) / min(load, compute)


class RequestParts:
    """One request whole, and each of its two parts alone; every method returns its milliseconds."""

    def __init__(self, bench: PromptBench) -> None:
        self._bench = bench

    def wall(self, timeline: Timeline | None = None) -> float:
        """As :meth:`PromptBench.blend` runs it."""
        bench = self._bench
        began = self._now()
        with bench.opened() as plan:
            request = plan.request(bench.prompt_tokens)
            logits, _, _ = bench.fusor.prefill(bench.ids, request, NEW_TOKENS, timeline=timeline)
            int(logits[0, -1].argmax())
        return self._now() - began

    def load(self) -> float:
        """Read the layers that this request reads, to buffers like its own."""
        bench = self._bench
        reads = self._reads  # before the time starts
        buffers = bench.fusor.new_cache(bench.prompt_tokens, NEW_TOKENS).buffers(
            bench.prompt_tokens
        )
        began = self._now()
        with bench.opened() as plan:
            loader = LayerLoader(buffers, [plan.spans if r else [] for r in reads])
            loader.start()
            try:
                for layer in range(len(buffers)):
                    loader.synchronize(layer)
                return self._now() - began
            finally:
                loader.close()

    def compute(self) -> float:
        """The same prefill with all KV in place when the time starts."""
        bench = self._bench
        with bench.opened() as plan:
            request = plan.request(bench.prompt_tokens)
            cache = bench.fusor.new_cache(bench.prompt_tokens, NEW_TOKENS)
            fused = bench.fusor.fuse(cache, request, last_row_only=True)
            with bench.adapter.lock, fused as fusion:
                for layer in range(len(cache.layers)):
                    fusion.loader.synchronize(layer)
                began = self._now()
                stock_prefill(bench.adapter, bench.ids, past_key_values=cache)
                return self._now() - began

    @cached_property
    def _reads(self) -> list[bool]:
        """Whether this request reads each layer: some policies compute layer 0 for all tokens."""
        timeline = Timeline()
        self.wall(timeline)
        read = {span.layer for span in timeline.spans if span.what == LOAD}
        return [layer in read for layer in range(len(self._bench.adapter.layout.layers))]

    def _now(self) -> float:
        return 1e3 * clock(self._bench.adapter.device)


@options.bench(trace_table, trace_figure, policy="random")
@torch.inference_mode()
def trace(
    timed: TimedModel,
    workload: Workload,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a Chrome/Perfetto trace (JSON) here.", show_default=False),
    ] = None,
    tier: Annotated[
        str,
        typer.Option(
            help="memory, disk, cold, a throughput, or balanced: loading takes as long as computing."
        ),
    ] = BALANCED,
    tick: Tick = silent,
) -> TraceResult:
    """One request layer by layer: load, re-position, select, compute, and how much of it overlaps."""
    wanted = None if tier == BALANCED else parse_tier(tier)
    if out is not None:
        require_place("--out", out, ".json")
    wanted = wanted or _balanced(timed, workload, tick)
    with prompt_bench(timed, workload, wanted, tick) as (bench, there):
        result = _measure(bench, there, tick)
    if out is not None:
        out.write_text(json.dumps(chrome_trace(result)), encoding="utf-8")
    return result


def _balanced(timed: TimedModel, workload: Workload, tick: Tick) -> BenchTier:
    """A disk from which loading takes as long as computing does now."""
    with prompt_bench(timed, workload, ON_DISK, tick) as (bench, _):
        tick("measuring how long computing takes")
        parts = RequestParts(bench)
        parts.wall()
        ms = statistics.median(parts.compute() for _ in range(workload.rounds))
        return parse_tier(f"{bench.kv_bytes / ms / 1e3:.4g}MB/s")


def _measure(bench: PromptBench, there: TierStore, tick: Tick) -> TraceResult:
    workload, parts = bench.workload, RequestParts(bench)
    ways: dict[str, Callable[[], float]] = {
        "wall": parts.wall,
        "load": parts.load,
        "compute": parts.compute,
    }
    samples = run_rounds(ways, workload.rounds, tick, there.prepare, there.settle)
    there.prepare()
    timeline = Timeline()
    parts.wall(timeline)
    wall, load, compute = (Timing.of(samples[name]) for name in ways)
    return TraceResult(
        **conditions(bench.adapter, workload, there.tier.name),
        prompt_tokens=bench.prompt_tokens,
        wall_ms=wall,
        load_ms=load,
        compute_ms=compute,
        overlap=overlap(wall.median, load.median, compute.median),
        kv_bytes=bench.kv_bytes,
        spans=tuple(timeline.all_spans()),
    )


def chrome_trace(result: TraceResult) -> dict[str, Any]:
    """Trace events for Chrome (``about:tracing``) and Perfetto; times in microseconds."""
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
    about = {name: value for name, value in asdict(result).items() if name != "spans"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
