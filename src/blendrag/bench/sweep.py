"""TTFT over the recompute ratio, all ratios interleaved with stock prefill in one run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from blendrag.bench.ttft import TtftBench, Workload, interleaved
from blendrag.errors import InvalidInputError
from blendrag.model import ModelAdapter
from blendrag.store import open_store


@dataclass(frozen=True)
class SweepRow:
    """One ratio; speedup and floor are against stock prefill of the same run."""

    ratio: float
    charged_ratio: float
    ms: float
    full_ms: float
    speedup: float
    floor_speedup: float


def parse_ratios(text: str) -> list[float]:
    """``"0.05,0.15"`` → floats in [0, 1]; raises :class:`InvalidInputError`."""
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError as exc:
        raise InvalidInputError(f"ratios {text!r}: expected comma-separated numbers") from exc
    for ratio in ratios:
        if not 0.0 <= ratio <= 1.0:
            raise InvalidInputError(f"ratio {ratio} is outside [0, 1]")
    return ratios


@torch.inference_mode()
def run_sweep(
    adapter: ModelAdapter,
    workload: Workload,
    ratios: list[float],
    tick: Callable[[str], None] = lambda text: None,
) -> list[SweepRow]:
    """Rows for ``ratios``, ascending as given."""
    with tempfile.TemporaryDirectory(prefix="blendrag-bench-") as root:
        store = open_store(Path(root) / "store", ram_bytes=0, disk_bytes=1 << 40)
        try:
            bench = TtftBench(adapter, workload, store)

            def at(ratio: float) -> Callable[[], int]:
                return lambda: bench.blended("blend", workload.policy, ratio)[0]

            ways: dict[str, Callable[[], int]] = {"full": bench.full}
            ways |= {str(ratio): at(ratio) for ratio in ratios}
            for way in ways.values():
                way()
            timings = interleaved(ways, workload.rounds, adapter.device, tick)
            full = timings["full"].median
            rows = []
            for ratio in ratios:
                counts = bench.blended("blend", workload.policy, ratio)[1]
                ms = timings[str(ratio)].median
                floor = bench.floor_speedup(counts)
                rows.append(
                    SweepRow(counts.ratio, counts.charged_ratio, ms, full, full / ms, floor)
                )
            return rows
        finally:
            store.close()
