"""TTFT over one factor at a time, all its values interleaved with stock prefill in one run.

A factor is a part of the workload (ratio, number and length of chunks, length of the prompt), or what it
runs on: the model's geometry, the tier that KV comes from, the encoding it is stored in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from blendrag.errors import InvalidInputError
from blendrag.lab.bench.rounds import Timing, interleaved
from blendrag.lab.bench.tiers import BenchTier, TierStore, parse_tier, tier_store
from blendrag.lab.bench.ttft import TtftBench
from blendrag.lab.bench.workload import Workload
from blendrag.model import ModelAdapter

#: Factors → the values they are swept over where none are named.
FACTORS = {
    "ratio": "0.05,0.1,0.15,0.2,0.3,0.5,1.0",
    "chunks": "2,4,6,8,12",
    "chunk-tokens": "128,256,512,1024,2048",
    "context": "1024,2048,4096,8192,16384",
    "geometry": "qwen2.5-0.5b,qwen2.5-1.5b",
    "tier": "memory,disk,cold,1GB/s,0.5GB/s",
    "encoding": "native,int8",
}


#: Factors whose value is the most that a prompt may have, not what it has.
LIMITS = ("context",)


@dataclass(frozen=True)
class Case:
    """One value of the factor, and everything else as it is for all of them."""

    value: str
    workload: Workload
    tier: BenchTier
    geometry: str | None
    """``None`` for a model that is loaded."""

    @property
    def place(self) -> tuple[object, ...]:
        """What decides on the stored KV: cases that agree on it share a store."""
        return (self.prompt, self.tier, self.workload.encoding)

    @property
    def prompt(self) -> tuple[object, ...]:
        """What decides on a stock prefill."""
        w = self.workload
        return (self.geometry, w.chunks, w.chunk_tokens, w.question_tokens)


@dataclass(frozen=True)
class SweepRow:
    """One value; speedups and floor are against stock prefill of the same run and prompt."""

    factor: str
    value: str
    prompt_tokens: int
    ratio: float
    charged_ratio: float
    ms: float
    """Of blend."""
    spread_ms: tuple[float, float]
    """Lowest and highest, here and of the others."""
    full_ms: float
    full_spread_ms: tuple[float, float]
    reuse_ms: float
    reuse_spread_ms: tuple[float, float]
    speedup: float
    reuse_speedup: float
    floor_speedup: float
    kv_bytes: int
    """Of the prompt's chunks, as stored."""

    @property
    def label(self) -> str:
        """The value as it stands in tables."""
        return f"≤ {self.value}" if self.factor in LIMITS else self.value


@dataclass(frozen=True)
class SweepResult:
    """One run over one factor."""

    factor: str
    about: tuple[str, str]
    """What was as it is for all values, in words."""
    rounds: int
    rows: tuple[SweepRow, ...]


def make_cases(factor: str, values: str | None, base: Case) -> list[Case]:
    """Cases for comma-separated ``values``, the usual ones by default; raises :class:`InvalidInputError`."""
    if factor not in FACTORS:
        raise InvalidInputError(
            f"factor {factor!r} is none of {', '.join(FACTORS)}; sweep one of them"
        )
    named = FACTORS[factor] if values is None else values
    return [_case(factor, part.strip(), base) for part in named.split(",")]


def _case(factor: str, value: str, base: Case) -> Case:
    workload = base.workload
    if factor == "geometry":
        return replace(base, value=value, geometry=value)
    if factor == "tier":
        return replace(base, value=value, tier=parse_tier(value))
    if factor == "encoding":
        changed = replace(workload, encoding=value)
    elif factor == "ratio":
        changed = replace(workload, ratio=parse_ratio(value))
    elif factor == "chunks":
        changed = replace(workload, chunks=_count(factor, value))
    elif factor == "chunk-tokens":
        changed = replace(workload, chunk_tokens=_count(factor, value))
    else:
        chunks = (_count(factor, value) - workload.question_tokens) // workload.chunk_tokens
        if chunks < 1:
            raise InvalidInputError(
                f"context {value} has no room for a chunk of {workload.chunk_tokens} tokens and "
                f"{workload.question_tokens} of a question; take a longer one or shorter chunks"
            )
        changed = replace(workload, chunks=chunks)
    return replace(base, value=value, workload=changed)


def parse_ratio(value: str) -> float:
    """A number in [0, 1]; raises :class:`InvalidInputError`."""
    try:
        ratio = float(value)
    except ValueError as exc:
        raise InvalidInputError(
            f"ratio {value!r}: expected comma-separated numbers in [0, 1]"
        ) from exc
    if not 0.0 <= ratio <= 1.0:
        raise InvalidInputError(f"ratio {ratio} is outside [0, 1]")
    return ratio


def _count(factor: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise InvalidInputError(
            f"{factor} {value!r}: expected comma-separated whole numbers of 1 or more"
        )
    return int(value)


@torch.inference_mode()
def run_sweep(
    adapter_of: Callable[[str | None], ModelAdapter],
    factor: str,
    cases: Sequence[Case],
    tick: Callable[[str], None] = lambda text: None,
) -> list[SweepRow]:
    """Rows in the order of ``cases``; ``adapter_of(geometry)`` is asked once for each that they name."""
    with ExitStack() as stores:
        adapters = {g: adapter_of(g) for g in dict.fromkeys(case.geometry for case in cases)}
        benches: dict[object, tuple[TtftBench, TierStore]] = {}
        for case in cases:
            if case.place not in benches:
                tick(f"encoding the chunks, {factor} {case.value}")
                there = stores.enter_context(tier_store(case.tier))
                bench = TtftBench(adapters[case.geometry], case.workload, there.store)
                benches[case.place] = bench, there
        return _measure(factor, cases, benches, tick)


def _measure(
    factor: str,
    cases: Sequence[Case],
    benches: dict[object, tuple[TtftBench, TierStore]],
    tick: Callable[[str], None],
) -> list[SweepRow]:
    ways: dict[str, Callable[[], object]] = {}
    stores: dict[str, TierStore] = {}
    for case in cases:
        bench, there = benches[case.place]
        blend = _blend(bench, case.workload)
        found = {_name("full", case.prompt): bench.full, _name("reuse", case.place): bench.reuse}
        for name, way in {**found, _name("blend", case): blend}.items():
            ways.setdefault(name, way)
            stores.setdefault(name, there)
    tick("warming up")
    for way in ways.values():
        way()
    for there in stores.values():
        there.settle()
    device = next(iter(benches.values()))[0].adapter.device
    rounds = cases[0].workload.rounds
    timings = interleaved(ways, rounds, device, tick, lambda name: stores[name].prepare())
    return [_row(factor, case, benches[case.place][0], timings) for case in cases]


def _name(way: str, key: object) -> str:
    return f"{way} {key!r}"


def _blend(bench: TtftBench, workload: Workload) -> Callable[[], object]:
    return lambda: bench.blended("blend", workload.policy, workload.ratio)


def _row(factor: str, case: Case, bench: TtftBench, timings: dict[str, Timing]) -> SweepRow:
    workload = case.workload
    counts = bench.blended("blend", workload.policy, workload.ratio)[1]
    blend = timings[_name("blend", case)]
    full = timings[_name("full", case.prompt)]
    reuse = timings[_name("reuse", case.place)]
    return SweepRow(
        factor=factor,
        value=case.value,
        prompt_tokens=bench.prompt_tokens,
        ratio=counts.ratio,
        charged_ratio=counts.charged_ratio,
        ms=blend.median,
        spread_ms=(blend.low, blend.high),
        full_ms=full.median,
        full_spread_ms=(full.low, full.high),
        reuse_ms=reuse.median,
        reuse_spread_ms=(reuse.low, reuse.high),
        speedup=full.median / blend.median,
        reuse_speedup=full.median / reuse.median,
        floor_speedup=bench.floor_speedup(counts),
        kv_bytes=bench.kv_bytes,
    )
