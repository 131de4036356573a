"""Benches: ratios of times within one run, from medians of interleaved rounds.

One file per bench has its command, its result, its table and its measurement.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blendrag.lab.bench.options import Bench

NAMES = (
    "ttft", "sweep", "throughput", "trace", "load", "auto", "overhead", "ingest", "store", "recognise",
)  # fmt: skip


def all_benches() -> dict[str, Bench]:
    """Every bench by its name. Imports torch."""
    from blendrag.lab.bench.options import BENCHES

    for name in NAMES:
        import_module(f"blendrag.lab.bench.{name}")
    return {name: BENCHES[name] for name in NAMES}
