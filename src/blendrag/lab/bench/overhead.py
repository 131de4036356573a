"""What a request costs beside arithmetic: operators, time of the host and time a layer.

Measured on a geometry so small that its products take no time to speak of. On a GPU each operator is a kernel
to launch, which is what binds a request there as long as its rows are few.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blendrag.config import UNCALIBRATED_SCHEDULE
from blendrag.fusor.selection import make_policy
from blendrag.lab.bench.rounds import milliseconds
from blendrag.lab.bench.tiers import parse_tier, tier_store
from blendrag.lab.bench.ttft import TtftBench
from blendrag.lab.bench.workload import Workload
from blendrag.model import ModelAdapter

#: A schedule whose rows fall from layer to layer.
FALLING = "geometric:0.9"
#: Operators that compute nothing, whatever they return.
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach_")
#: Operators for which the host waits for the device.
_WAITING = ("item", "_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")


@dataclass(frozen=True)
class OverheadRow:
    """One way to prefill a prompt of so many chunks."""

    way: str
    chunks: int
    operators: int
    """ATen operators that compute something: no views, allocations, or conversions to the same dtype."""
    waits: int
    """Operators among them for which the host waits for the device."""
    ms: float
    """Median milliseconds of a request."""
    spread_ms: tuple[float, float]
    host_ms: float
    """Median milliseconds of CPU time of the thread that computes: Python and dispatch."""
    layer_us: float
    """Microseconds a layer, of :attr:`ms`."""
    over_stock: float
    """Operators over those of the stock prefill of the same prompt."""


@dataclass(frozen=True)
class OverheadResult:
    """Every way for every number of chunks."""

    model: str
    dtype: str
    device: str
    layers: int
    chunk_tokens: int
    question_tokens: int
    ratio: float
    rounds: int
    rows: tuple[OverheadRow, ...]


class OperatorCount(TorchDispatchMode):
    """Within this context, counts the operators that this thread dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.waits = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _FREE and (func._schema.is_mutable or not _aliases(out, args)):
            self.operators += 1
            self.waits += name in _WAITING
        return out


def operators_of(work: Callable[[], object]) -> OperatorCount:
    """What ``work`` dispatches on this thread."""
    with OperatorCount() as count:
        work()
    return count


@torch.inference_mode()
def run_overhead(
    adapter: ModelAdapter,
    workload: Workload,
    chunks: Sequence[int],
    policies: Sequence[str],
    tick: Callable[[str], None] = lambda text: None,
) -> OverheadResult:
    """Stock prefill, and each policy over KV in memory; policies that follow a schedule with two of them."""
    layers = len(adapter.stack.layers)
    rows: list[OverheadRow] = []
    for count in chunks:
        with tier_store(parse_tier("memory")) as there:
            bench = TtftBench(adapter, replace(workload, chunks=count), there.store)
            ways = _ways(bench, policies)
            timings = _timed(ways, workload.rounds, adapter.device, tick)
            counted = {name: operators_of(way) for name, way in ways.items()}
        for name, (wall, host) in timings.items():
            found = counted[name]
            median = statistics.median(wall)
            rows.append(
                OverheadRow(
                    name,
                    count,
                    found.operators,
                    found.waits,
                    median,
                    (min(wall), max(wall)),
                    statistics.median(host),
                    1e3 * median / layers,
                    found.operators / counted["stock"].operators,
                )
            )
    return OverheadResult(
        adapter.model_id,
        adapter.layout.dtype,
        str(adapter.device),
        layers,
        workload.chunk_tokens,
        workload.question_tokens,
        workload.ratio,
        workload.rounds,
        tuple(rows),
    )


def _ways(bench: TtftBench, policies: Sequence[str]) -> dict[str, Callable[[], object]]:
    ways: dict[str, Callable[[], object]] = {"stock": bench.full}

    def blend(policy: str, schedule: str) -> Callable[[], object]:
        def way() -> None:
            bench.blended("blend", policy, bench.workload.ratio, schedule)

        return way

    for policy in policies:
        if not make_policy(policy).follows_schedule:
            ways[policy] = blend(policy, UNCALIBRATED_SCHEDULE)
            continue
        for schedule in (UNCALIBRATED_SCHEDULE, FALLING):
            ways[f"{policy}, {schedule}"] = blend(policy, schedule)
    return ways


def _timed(
    ways: dict[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    tick: Callable[[str], None],
) -> dict[str, tuple[list[float], list[float]]]:
    """Milliseconds and milliseconds of this thread's CPU time of each way, in alternating rounds."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for number in range(-1, rounds):  # the first to warm up
        tick(f"round {number + 1} of {rounds}")
        for name, way in ways.items():
            began = time.thread_time()
            ms = milliseconds(way, device)
            if number >= 0:
                found[name][0].append(ms)
                found[name][1].append(1e3 * (time.thread_time() - began))
    return found


def _aliases(out: Any, args: Iterable[Any]) -> bool:
    """Whether what came out is only another view of what went in."""
    results = [t for t in (out if isinstance(out, tuple | list) else (out,)) if _is_tensor(t)]
    given = {t.untyped_storage()._cdata for t in args if _is_tensor(t)}
    return bool(results) and all(t.untyped_storage()._cdata in given for t in results)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
