"""``blendrag bench trace``: the timeline of one request, and how much of its loading overlaps computing.

The overlap is measured, not read off the timeline: the same request runs whole, loading only, and computing
only (with its KV in place before the time starts). The timeline is of one more run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from blendrag.fusor.loader import LayerLoader
from blendrag.metrics import COMPUTE, LOAD, REPOSITION, SELECT, WAIT, Span, Timeline
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.rounds import Tick, Timing, milliseconds, silent, time_ways
from blendrag_lab.bench.tiers import ON_DISK, BenchTier, parse_tier
from blendrag_lab.bench.workload import (
    NEW_TOKENS,
    BlendResult,
    PromptBench,
    Workload,
    conditions,
    prompt_bench,
    stock_prefill,
)
from blendrag_lab.plots import COLOURS, PANEL_HEIGHT, panels, title
from blendrag_lab.tables import ResultTable, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The tier that is throttled so that loading takes as long as computing.
BALANCED = "balanced"
BLUE, _, GREEN, PINK, ORANGE, SKY, _ = COLOURS
#: Lanes of the figure, with two shades each, because neighbouring layers must look different.
SHADES = {
    LOAD: (BLUE, SKY),
    WAIT: ("#c0c0c0", "#dddddd"),
    REPOSITION: (PINK, "#e3b3cd"),
    SELECT: (ORANGE, "#f3cd7a"),
    COMPUTE: (GREEN, "#7fceb8"),
}


@dataclass(frozen=True, kw_only=True)
class TraceResult(BlendResult):
    prompt_tokens: int
    wall_ms: Timing
    """The whole request, from opening its chunks to its first token."""
    load_ms: Timing
    compute_ms: Timing
    """Everything else alone, with all KV in place."""
    overlap: float
    kv_bytes: int
    spans: tuple[Span, ...]


def trace_table(result: TraceResult) -> ResultTable:
    load, compute = result.load_ms.median, result.compute_ms.median
    bound = max(load, compute)  # no request is faster
    rows = [
        ("the request", str(result.wall_ms)),
        ("loading alone", str(result.load_ms)),
        ("computing alone", str(result.compute_ms)),
        ("bound: the longer of the two", figure(bound)),
    ]
    return ResultTable(
        ("what", "ms (lowest to highest)"),
        rows,
        f"{result.prompt_tokens:,} tokens, {result.kv_bytes / 1e6:,.1f} MB of KV: {result.about}",
        [f"Overlap {result.overlap:.2f}. Bound over request {bound / result.wall_ms.median:.2f}."],
    )


def trace_figure(result: TraceResult) -> Figure:
    """A lane for each kind of work over milliseconds, a box for each layer; a scout pass is hatched."""
    figure, (axes,) = panels(1, legend=False)
    figure.set_size_inches(10.0, PANEL_HEIGHT)
    lanes = list(SHADES)
    for span in result.spans:
        axes.broken_barh(
            [(1e3 * span.began_s, 1e3 * span.seconds)],
            (lanes.index(span.what) - 0.4, 0.8),
            facecolors=SHADES[span.what][span.layer % 2],
            hatch="////" if span.pass_name else None,
            edgecolor="white" if span.pass_name else "none",
            linewidth=0,
        )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel(
        "milliseconds of one request; shades alternate by layer, the scout pass is hatched"
    )
    axes.set_xlim(0, None)
    title(
        axes,
        f"{result.model}, {result.prompt_tokens} tokens, {result.policy} at r = {result.ratio:g}, KV from "
        f"{result.tier}: overlap {result.overlap:.2f}",
    )
    return figure


def overlap(wall: float, load: float, compute: float) -> float:
    """1 − (wall − max(load, compute)) / min(load, compute); more than 1 only by noise."""
    return 1 - (wall - max(load, compute)) / min(load, compute)


def layers_read(bench: PromptBench) -> list[bool]:
    """Whether the request reads each layer: some policies compute layer 0 for all tokens."""
    timeline = Timeline()
    bench.blend(timeline)
    read = {span.layer for span in timeline.spans if span.what == LOAD}
    return [layer in read for layer in range(len(bench.adapter.layout.layers))]


def load_ms(bench: PromptBench, reads: Sequence[bool]) -> float:
    """Milliseconds to read the layers in ``reads`` to buffers like those of the request."""
    cache = bench.fusor.new_cache(bench.prompt_tokens, NEW_TOKENS)
    buffers = cache.buffers(bench.prompt_tokens)

    def run() -> None:
        with bench.opened(bench.prompt) as plan:
            loader = LayerLoader(buffers, [plan.spans if r else [] for r in reads])
            loader.start()
            try:
                for layer in range(len(buffers)):
                    loader.synchronize(layer)
            finally:
                loader.close()

    return bench.timer(run)()


def compute_ms(bench: PromptBench) -> float:
    """Milliseconds of the same prefill with all KV in place when the time starts."""
    adapter = bench.adapter
    bench.there.prepare()
    with bench.opened(bench.prompt) as plan:
        request = plan.request(bench.prompt_tokens)
        cache = bench.fusor.new_cache(bench.prompt_tokens, NEW_TOKENS)
        with adapter.lock, bench.fusor.fuse(cache, request, last_row_only=True) as fusion:
            for layer in range(len(cache.layers)):
                fusion.loader.synchronize(layer)
            prefill = partial(stock_prefill, adapter, bench.ids, past_key_values=cache)
            return milliseconds(prefill, adapter.device)


@options.bench(trace_table, trace_figure, policy="random")
@torch.inference_mode()
def trace(
    timed: TimedModel,
    workload: Workload,
    tier: Annotated[
        str,
        typer.Option(
            help="memory, disk, cold, a throughput, or balanced: loading takes as long as computing."
        ),
    ] = BALANCED,
    tick: Tick = silent,
) -> TraceResult:
    wanted = _balanced(timed, workload, tick) if tier == BALANCED else parse_tier(tier)
    with prompt_bench(timed, workload, wanted, tick) as bench:
        ways: dict[str, Callable[[], float]] = {
            "wall": bench.timer(bench.blend),
            "load": partial(load_ms, bench, layers_read(bench)),
            "compute": partial(compute_ms, bench),
        }
        ms = time_ways(ways, workload.rounds, tick)
        bench.there.prepare()
        timeline = Timeline()
        bench.blend(timeline)
    return TraceResult(
        **conditions(timed.adapter, workload, wanted.name),
        prompt_tokens=bench.prompt_tokens,
        wall_ms=ms["wall"],
        load_ms=ms["load"],
        compute_ms=ms["compute"],
        overlap=overlap(*(ms[name].median for name in ways)),
        kv_bytes=bench.kv_bytes,
        spans=tuple(timeline.all_spans()),
    )


def _balanced(timed: TimedModel, workload: Workload, tick: Tick) -> BenchTier:
    """A disk from which loading takes as long as computing does now."""
    with prompt_bench(timed, workload, ON_DISK, tick) as bench:
        tick("measuring how long computing takes")
        bench.blend()
        ms = statistics.median(compute_ms(bench) for _ in range(workload.rounds))
        speed = bench.kv_bytes / ms * 1e3
        return BenchTier(f"{speed / 1e6:.4g}MB/s", speed)
