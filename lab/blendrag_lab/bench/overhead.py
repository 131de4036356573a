"""``blendrag bench overhead``: operators, CPU time of the host and time per layer of a request; with
``--decode`` those of a decoded token (:mod:`blendrag_lab.bench.decode_overhead`).

The default geometry is so small that arithmetic takes almost no time. On a GPU every operator is a kernel
launch, and launches limit requests with few rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch.utils._python_dispatch import TorchDispatchMode

from blendrag.cli.output import count
from blendrag.config import DEFAULT_POLICY, DEFAULT_SCHEDULE
from blendrag.fusor.selection import make_policy
from blendrag_lab.bench import options
from blendrag_lab.bench.decode_overhead import (
    DecodeOverheadResult,
    decode_overhead,
    decode_table,
)
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.options import machine_of
from blendrag_lab.bench.rounds import Tick, Timing, run_rounds, silent
from blendrag_lab.bench.tiers import BenchTier
from blendrag_lab.bench.workload import PromptBench, Workload, prompt_bench, whole_numbers
from blendrag_lab.tables import ResultTable, figure, table, times

#: A schedule whose rows decrease from layer to layer.
FALLING = "geometric:0.9"
#: Operators that compute nothing.
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach_")
#: Operators for which the host waits for the device.
_WAITING = ("item", "_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")


@dataclass(frozen=True)
class OverheadRow:
    way: str
    chunks: int
    operators: int
    """ATen operators that compute: no views, allocations, or conversions to the same dtype."""
    waits: int
    """Those of them for which the host waits for the device."""
    ms: Timing
    host_ms: float
    """Median CPU time of the computing thread: Python and dispatch."""
    layer_us: float
    over_stock: float
    """Operators over those of stock prefill of the same prompt."""


@dataclass(frozen=True)
class OverheadResult:
    machine: str
    model: str
    layers: int
    chunk_tokens: int
    question_tokens: int
    ratio: float
    rounds: int
    rows: tuple[OverheadRow, ...]


def overhead_table(result: OverheadResult | DecodeOverheadResult) -> ResultTable:
    if isinstance(result, DecodeOverheadResult):
        return decode_table(result)
    return table(
        [
            ("way", lambda row: row.way),
            ("chunks", lambda row: str(row.chunks)),
            ("operators", lambda row: f"{row.operators:,}"),
            ("of stock's", lambda row: times(row.over_stock)),
            ("ms (lowest to highest)", lambda row: str(row.ms)),
            ("host ms", lambda row: figure(row.host_ms)),
            ("µs per layer", lambda row: f"{row.layer_us:,.0f}"),
        ],
        result.rows,
        f"{result.model}, {result.layers} layers, chunks of {result.chunk_tokens} tokens and a question of "
        f"{result.question_tokens}, r = {result.ratio:g}, KV from memory, {count(result.rounds, 'round')}",
    )


class OperatorCount(TorchDispatchMode):
    """Counts the operators that this thread dispatches in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.waits = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        results = _storages(out if isinstance(out, tuple | list) else (out,))
        is_view = bool(results) and results <= _storages(args)
        if name not in _FREE and (func._schema.is_mutable or not is_view):
            self.operators += 1
            self.waits += name in _WAITING
        return out


def _storages(values: Iterable[Any]) -> set[int]:
    return {t.untyped_storage()._cdata for t in values if isinstance(t, torch.Tensor)}


@options.bench(overhead_table)
@torch.inference_mode()
def overhead(
    geometry: options.Geometry = "deep",
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    chunks: Annotated[str, typer.Option(help="Chunks per prompt, comma-separated.")] = "6,20",
    chunk_tokens: options.Count = 32,
    question_tokens: options.Count = 16,
    policies: Annotated[str, typer.Option(help="Selection policies, comma-separated.")] = (
        f"reuse,{DEFAULT_POLICY},hkvd"
    ),
    ratio: options.Ratio = 0.15,
    rounds: options.Rounds = 9,
    decode: Annotated[
        bool, typer.Option("--decode", help="Measure decoded tokens after the longest prompt.")
    ] = False,
    tick: Tick = silent,
) -> OverheadResult | DecodeOverheadResult:
    numbers = whole_numbers(chunks, "numbers of chunks", "6,20")
    names = list(dict.fromkeys(name.strip() for name in policies.split(",")))
    timed = TimedModel(geometry, None, dtype, device)
    adapter = timed.adapter
    if decode:
        prompt_tokens = max(numbers) * chunk_tokens + question_tokens
        return decode_overhead(adapter, prompt_tokens, rounds, tick)
    rows: list[OverheadRow] = []
    for number in numbers:
        workload = Workload(number, chunk_tokens, question_tokens, ratio, rounds=rounds)
        with prompt_bench(timed, workload, BenchTier("memory"), tick) as bench:
            rows += _rows(bench, names, tick)
    return OverheadResult(
        machine=machine_of(adapter),
        model=adapter.model_id,
        layers=len(adapter.stack.layers),
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        ratio=ratio,
        rounds=rounds,
        rows=tuple(rows),
    )


def _rows(bench: PromptBench, policies: Sequence[str], tick: Tick) -> Iterator[OverheadRow]:
    """Stock prefill, and each policy with every schedule that it follows."""
    ways: dict[str, Callable[[], object]] = {"stock": bench.full}
    for policy in policies:
        blend = partial(bench.blend, policy=policy)
        if make_policy(policy).follows_schedule:
            for schedule in (DEFAULT_SCHEDULE, FALLING):
                ways[f"{policy}, {schedule}"] = partial(blend, schedule=schedule)
        else:
            ways[policy] = blend

    def timed(way: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds, and milliseconds of this thread's CPU time."""
        began = time.thread_time()
        ms = bench.timer(way)()
        return ms, 1e3 * (time.thread_time() - began)

    timers = {name: partial(timed, way) for name, way in ways.items()}
    samples = run_rounds(timers, bench.workload.rounds, tick)
    counted = {}
    for name, way in ways.items():
        with OperatorCount() as counted[name]:
            way()
    for name, found in counted.items():
        wall, host = zip(*samples[name], strict=True)
        ms = Timing.of(wall)
        yield OverheadRow(
            way=name,
            chunks=bench.workload.chunks,
            operators=found.operators,
            waits=found.waits,
            ms=ms,
            host_ms=statistics.median(host),
            layer_us=1e3 * ms.median / len(bench.adapter.stack.layers),
            over_stock=found.operators / counted["stock"].operators,
        )
