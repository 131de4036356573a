"""``blendrag bench sweep``: TTFT over one factor, with all values interleaved in one run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from blendrag.cli.output import count
from blendrag.errors import InvalidInputError
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.options import machine_of
from blendrag_lab.bench.rounds import Tick, Timing, silent, time_ways
from blendrag_lab.bench.tiers import BenchTier, parse_tier
from blendrag_lab.bench.workload import (
    PromptBench,
    Workload,
    parse_ratios,
    prompt_bench,
    whole_numbers,
)
from blendrag_lab.figure_styles import log_scale, styles
from blendrag_lab.plots import Series, draw, legend, panels, title
from blendrag_lab.tables import ResultTable, table, times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
#: Factors whose values are numbers, and those of them whose values double.
NUMBERS = ("ratio", "chunks", "chunk-tokens", "context")
DOUBLING = ("chunk-tokens", "context")
#: In place of what differs from row to row.
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
    machine: str
    factor: str
    about: tuple[str, str]
    """What is equal for all values, in words."""
    rounds: int
    rows: tuple[SweepRow, ...]


def sweep_table(result: SweepResult) -> ResultTable:
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


def sweep_figure(result: SweepResult) -> Figure:
    """Median TTFT of full prefill, reuse and blend by the factor's value, with the lowest and highest."""
    figure, (axes,) = panels(1)
    factor, rows = result.factor, result.rows
    by_tokens = factor == "context"  # its values are limits
    values = [str(row.prompt_tokens) if by_tokens else row.value for row in rows]
    joined = factor in NUMBERS
    x = [float(value) if joined else i for i, value in enumerate(values)]
    lines, known = [], styles(["full", "reuse", "blend"])
    for label, style, timings in (
        ("full prefill", known["full"], [row.full_ms for row in rows]),
        ("reuse", known["reuse"], [row.reuse_ms for row in rows]),
        ("blend", known["blend"], [row.blend_ms for row in rows]),
    ):
        shown = style if joined else replace(style, dash="none")
        bounds = ([ms.low for ms in timings], [ms.high for ms in timings])
        lines.append(Series(label, shown, x, [ms.median for ms in timings], *bounds))
    draw(axes, lines)
    if factor in DOUBLING:
        axes.set_xscale("log", base=2)
    if factor != "ratio":  # its values may be too many and too close for a tick each
        axes.set_xticks(x, values)
        axes.set_xticks([], minor=True)
    axes.set(
        xlabel="tokens of the prompt" if by_tokens else factor,
        ylabel="milliseconds to the first token",
    )
    log_scale(axes)
    title(axes, "\n".join(result.about))
    legend(figure, [axes])
    return figure


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
    if factor == "geometry":
        return replace(base, value=value, geometry=value)
    if factor == "tier":
        return replace(base, value=value, tier=parse_tier(value))
    changed: dict[str, Any] = {factor: value}
    if factor == "ratio":
        (changed[factor],) = parse_ratios(value)
    elif factor != "encoding":
        (number,) = whole_numbers(value, factor, "4")
        changed = {factor.replace("-", "_"): number}
        if factor == "context":
            chunks = (number - workload.question_tokens) // workload.chunk_tokens
            if chunks < 1:
                raise InvalidInputError(
                    f"context {value} has no room for a chunk of {workload.chunk_tokens} tokens and a "
                    f"question of {workload.question_tokens}; take a longer context or shorter chunks"
                )
            changed = {"chunks": chunks}
    return replace(base, value=value, workload=replace(workload, **changed))


def _about(factor: str, base: SweepCase, model: str | None) -> tuple[str, str]:
    w: dict[str, Any] = vars(base.workload) | {"tier": base.tier.name}
    w["ratio"] = f"{base.workload.ratio:g}"
    w["chunks" if factor == "context" else factor.replace("-", "_")] = OPEN
    return (
        f"{model or base.geometry or OPEN}, {w['chunks']} × {w['chunk_tokens']} + "
        f"{w['question_tokens']} tokens",
        f"{w['policy']} at r = {w['ratio']}, {w['encoding']} KV from {w['tier']}",
    )


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
    if factor == "geometry" and (timed.geometry, timed.model) != (None, None):
        raise InvalidInputError(
            "--factor geometry with --geometry or --model; name geometries with --values"
        )
    base = SweepCase("", workload, parse_tier(tier), timed.geometry)
    cases = make_cases(factor, values, base)
    models = {case.geometry: replace(timed, geometry=case.geometry) for case in cases}
    adapters = [model.adapter for model in models.values()]  # unknown names are refused now
    with ExitStack() as stores:
        benches: dict[object, PromptBench] = {}
        ways: dict[object, Callable[[], float]] = {}
        for case in cases:
            if case.place not in benches:
                opened = prompt_bench(models[case.geometry], case.workload, case.tier, tick)
                benches[case.place] = stores.enter_context(opened)
            bench = benches[case.place]
            # Cases share stock prefills of equal prompts and reuse of equal stores.
            ways["full", case.prompt] = bench.timer(bench.full)
            ways["reuse", case.place] = bench.timer(bench.reuse)
            ways["blend", case] = bench.timer(bench.blend, ratio=case.workload.ratio)
        timings = time_ways(ways, workload.rounds, tick)
        return SweepResult(
            machine=machine_of(adapters[0]),
            factor=factor,
            about=_about(factor, base, timed.model),
            rounds=workload.rounds,
            rows=tuple(_row(case, benches[case.place], timings) for case in cases),
        )


def _row(case: SweepCase, bench: PromptBench, timings: dict[object, Timing]) -> SweepRow:
    counts = bench.blend(ratio=case.workload.ratio)[1].counts()
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
