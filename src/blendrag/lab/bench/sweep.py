"""``blendrag bench sweep``: TTFT over one factor, with all values interleaved in one run.

A factor is a part of the workload (ratio, number or length of chunks, length of the prompt), the model's
geometry, the tier that KV comes from, or the encoding it is stored in.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
import typer

from blendrag.cli.output import count
from blendrag.errors import InvalidInputError
from blendrag.lab.bench import options
from blendrag.lab.bench.geometry import TimedModel
from blendrag.lab.bench.options import Machine, machine_of
from blendrag.lab.bench.rounds import Tick, Timing, milliseconds, run_rounds, silent
from blendrag.lab.bench.tiers import BenchTier, TierStore, parse_tier
from blendrag.lab.bench.workload import (
    PromptBench,
    Workload,
    parse_ratios,
    prompt_bench,
    whole_numbers,
)
from blendrag.lab.plots import sweep_figure
from blendrag.lab.tables import ResultTable, table, times

#: Factors → their default values.
FACTORS = {
    "ratio": "0.05,0.1,0.15,0.2,0.3,0.5,1.0",
    "chunks": "2,4,6,8,12",
    "chunk-tokens": "128,256,512,1024,2048",
    "context": "1024,2048,4096,8192,16384",
    "geometry": "qwen2.5-0.5b,qwen2.5-1.5b",
    "tier": "memory,disk,cold,1GB/s,0.5GB/s",
    "encoding": "native,int8",
}
#: Stands for what differs from row to row.
OPEN = "…"


@dataclass(frozen=True)
class SweepRow:
    """One value; speedups and floor are against stock prefill of the same prompt in the same run."""

    value: str
    prompt_tokens: int
    ratio: float
    blend_ms: Timing
    full_ms: Timing
    reuse_ms: Timing
    speedup: float
    floor_speedup: float
    kv_bytes: int
    """Size of the prompt's chunks as stored."""


@dataclass(frozen=True)
class SweepResult:
    """One run over one factor."""

    machine: Machine
    factor: str
    about: tuple[str, str]
    """What is equal for all values, in words."""
    rounds: int
    rows: tuple[SweepRow, ...]


def _about(factor: str, base: SweepCase, model: str | None) -> tuple[str, str]:
    """What is equal for all values; what the factor changes is left open."""
    w = base.workload
    chunks = OPEN if factor in ("chunks", "context") else w.chunks
    chunk_tokens = OPEN if factor == "chunk-tokens" else w.chunk_tokens
    ratio = OPEN if factor == "ratio" else f"{w.ratio:g}"
    encoding = OPEN if factor == "encoding" else w.encoding
    tier = OPEN if factor == "tier" else base.tier.name
    return (
        f"{model or base.geometry or OPEN}, {chunks} × {chunk_tokens} + {w.question_tokens} tokens",
        f"{w.policy} at r = {ratio}, {encoding} KV from {tier}",
    )


def sweep_table(result: SweepResult) -> ResultTable:
    """A row for each value."""
    limit = "≤ " if result.factor == "context" else ""
    return table(
        [
            (result.factor, lambda row: f"{limit}{row.value}"),
            ("tokens", lambda row: f"{row.prompt_tokens:,}"),
            ("blend: TTFT ms (lowest to highest)", lambda row: str(row.blend_ms)),
            ("speedup", lambda row: times(row.speedup)),
            ("floor", lambda row: times(row.floor_speedup)),
            ("reuse", lambda row: str(row.reuse_ms)),
            ("full", lambda row: str(row.full_ms)),
        ],
        result.rows,
        f"{', '.join(result.about)}, {count(result.rounds, 'round')}",
    )


# -- what is measured -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepCase:
    """One value of the factor, with everything else."""

    value: str
    workload: Workload
    tier: BenchTier
    geometry: str | None
    """``None`` for a model that is loaded."""

    @property
    def prompt(self) -> tuple[object, ...]:
        """What decides on the time of a stock prefill."""
        w = self.workload
        return (self.geometry, w.chunks, w.chunk_tokens, w.question_tokens)

    @property
    def place(self) -> tuple[object, ...]:
        """What decides on the stored KV: cases with an equal place share a store."""
        return (self.prompt, self.tier, self.workload.encoding)


def make_cases(factor: str, values: str | None, base: SweepCase) -> list[SweepCase]:
    """Cases for comma-separated ``values``, or for the default ones; raises :class:`InvalidInputError`."""
    if factor not in FACTORS:
        raise InvalidInputError(
            f"factor {factor!r} is none of {', '.join(FACTORS)}; sweep one of them"
        )
    named = FACTORS[factor] if values is None else values
    return [_case(factor, part.strip(), base) for part in named.split(",")]


def _case(factor: str, value: str, base: SweepCase) -> SweepCase:
    workload = base.workload
    match factor:
        case "geometry":
            return replace(base, value=value, geometry=value)
        case "tier":
            return replace(base, value=value, tier=parse_tier(value))
        case "encoding":
            changed = replace(workload, encoding=value)
        case "ratio":
            (ratio,) = parse_ratios(value)
            changed = replace(workload, ratio=ratio)
        case "chunks":
            changed = replace(workload, chunks=_count(factor, value))
        case "chunk-tokens":
            changed = replace(workload, chunk_tokens=_count(factor, value))
        case _:
            room = _count(factor, value) - workload.question_tokens
            if room < workload.chunk_tokens:
                raise InvalidInputError(
                    f"context {value} has no room for a chunk of {workload.chunk_tokens} tokens and a "
                    f"question of {workload.question_tokens}; take a longer context or shorter chunks"
                )
            changed = replace(workload, chunks=room // workload.chunk_tokens)
    return replace(base, value=value, workload=changed)


def _count(factor: str, value: str) -> int:
    return whole_numbers(value, factor, "4")[0]


@options.bench(sweep_table, sweep_figure, rounds=3)
@torch.inference_mode()
def sweep(
    timed: TimedModel,
    workload: Workload,
    factor: Annotated[str, typer.Option(help=f"One of {', '.join(FACTORS)}.")] = "ratio",
    values: Annotated[
        str | None, typer.Option(help="Comma-separated values of the factor.", show_default=False)
    ] = None,
    tier: options.Tier = "disk",
    tick: Tick = silent,
) -> SweepResult:
    """Time to first token over one factor, all its values in one run."""
    if factor == "geometry" and (timed.geometry, timed.model) != (None, None):
        raise InvalidInputError(
            "--factor geometry with --geometry or --model; name geometries with --values"
        )
    base = SweepCase("", workload, parse_tier(tier), timed.geometry)
    cases = make_cases(factor, values, base)
    models = {c.geometry: replace(timed, geometry=c.geometry) for c in cases}
    adapters = {geometry: model.adapter for geometry, model in models.items()}
    first = adapters[cases[0].geometry]
    with ExitStack() as stores:
        benches: dict[object, tuple[PromptBench, TierStore]] = {}
        for case in cases:
            if case.place not in benches:
                opened = prompt_bench(models[case.geometry], case.workload, case.tier, tick)
                benches[case.place] = stores.enter_context(opened)
        ways: dict[object, Callable[[], object]] = {}
        places: dict[object, TierStore] = {}
        for case in cases:
            bench, there = benches[case.place]
            blend = partial(bench.blended, ratio=case.workload.ratio)
            # Cases share stock prefills of equal prompts and reuse of equal stores.
            shared: dict[object, Callable[[], object]] = {
                ("full", case.prompt): bench.full,
                ("reuse", case.place): bench.reuse,
            }
            shared["blend", case] = blend
            for name, way in shared.items():
                ways.setdefault(name, way)
                places.setdefault(name, there)

        timers = {name: partial(milliseconds, way, first.device) for name, way in ways.items()}

        def settle() -> None:
            for there in places.values():
                there.settle()

        samples = run_rounds(
            timers,
            workload.rounds,
            tick,
            lambda name: places[name].prepare(),
            settle,
        )
        timings = {name: Timing.of(ms) for name, ms in samples.items()}
        rows = tuple(_row(case, benches[case.place][0], timings) for case in cases)
    about = _about(factor, base, timed.model)
    return SweepResult(machine_of(first), factor, about, workload.rounds, rows)


def _row(case: SweepCase, bench: PromptBench, timings: dict[object, Timing]) -> SweepRow:
    counts = bench.blended(ratio=case.workload.ratio)[1]
    blend, full = timings["blend", case], timings["full", case.prompt]
    return SweepRow(
        value=case.value,
        prompt_tokens=bench.prompt_tokens,
        ratio=counts.ratio,
        blend_ms=blend,
        full_ms=full,
        reuse_ms=timings["reuse", case.place],
        speedup=full.median / blend.median,
        floor_speedup=bench.floor_speedup(counts),
        kv_bytes=bench.kv_bytes,
    )
