"""``blendrag bench ttft``: time to first token of stock prefill, prefix caching, full reuse and blend.

Inside the time: looking up, opening, reading and verifying the chunks in the store, re-positioning,
selecting, recomputing, the last logits and the choice of the token. Outside: retrieval, the chat template,
finding the chunks in the prompt, tokenising, and the way to the engine's thread and back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from blendrag.fusor import BlendRequest
from blendrag.fusor.loader import HeldKV, LoadedSpan
from blendrag.fusor.selection import Blending
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.rounds import Tick, Timing, peak_bytes, silent, time_ways
from blendrag_lab.bench.tiers import parse_tier
from blendrag_lab.bench.workload import (
    BlendResult,
    PromptBench,
    Workload,
    conditions,
    prompt_bench,
    stock_prefill,
)
from blendrag_lab.tables import NOTHING, ResultTable, times

RUNS = (
    "Layers with running states: blend recomputes chunks from their beginning on, up to tokens that the "
    "question attends to."
)


@dataclass(frozen=True, kw_only=True)
class TtftResult(BlendResult):
    """One run; speedups are against stock prefill."""

    prompt_tokens: int
    charged_ratio: float
    ms: dict[str, Timing]
    """By mode. ``prefix_fused`` is missing for a model with running states."""
    speedup: float
    """Full prefill over blend."""
    floor_speedup: float
    kv_bytes: int
    state_bytes: int
    """Of :attr:`kv_bytes`, what is stored of running states."""
    peak_bytes: dict[str, int | None]
    """By mode, over the memory at its start; ``None`` if the system does not report it."""
    notes: tuple[str, ...] = ()


def ttft_table(result: TtftResult) -> ResultTable:
    modes = {
        "full": "full: stock prefill",
        "prefix_stock": "prefix: first chunk cached, stock cache",
        "prefix_fused": "prefix, through the fusor",
        "blend": f"blend, r = {result.ratio:.3g} (charged {result.charged_ratio:.3f})",
        "reuse": "reuse",
    }
    rows = []
    for mode, name in modes.items():
        if mode not in result.ms:
            continue
        peak = result.peak_bytes.get(mode)
        speedup = result.ms["full"].median / result.ms[mode].median
        floor = f" (floor {times(result.floor_speedup)})" if mode == "blend" else ""
        memory = NOTHING if peak is None else f"{peak / 1e6:,.0f}"
        rows.append((name, str(result.ms[mode]), times(speedup) + floor, memory))
    return ResultTable(
        ("mode", "TTFT ms (lowest to highest)", "speedup", "peak memory, MB"),
        rows,
        f"{result.prompt_tokens:,} tokens, {_stored(result)}: {result.about}",
        result.notes,
    )


def _stored(result: TtftResult) -> str:
    if not result.state_bytes:
        return f"{result.kv_bytes / 1e6:,.1f} MB of KV"
    kv_bytes = result.kv_bytes - result.state_bytes
    return (
        f"{kv_bytes / 1e6:,.1f} MB of KV and {result.state_bytes / 1e6:,.1f} MB of running states"
    )


class CachedPrefix:
    """Idealised prefix caching: the KV of the first chunk is in memory when the time starts."""

    def __init__(self, bench: PromptBench) -> None:
        self._bench = bench
        self._tokens = bench.workload.chunk_tokens
        first = bench.ids[:, : self._tokens]
        self._cache = bench.adapter.model(input_ids=first, use_cache=True).past_key_values
        self._kv = bench.adapter.encode((), first[0].tolist())  # exact: nothing precedes it

    def stock(self) -> int:
        """Stock prefill of the rest over a stock cache."""
        cache = copy.deepcopy(self._cache)
        rest = self._bench.ids[:, self._tokens :]
        return stock_prefill(self._bench.adapter, rest, past_key_values=cache)

    def fused(self) -> int:
        """The rest through the fusor, whose attention does not repeat KV heads."""
        bench = self._bench
        span = LoadedSpan(0, self._tokens, HeldKV(self._kv), 0, exact=True)
        return bench.prefill(BlendRequest(bench.prompt_tokens, (span,), Blending.of("full")))[0]


@options.bench(ttft_table)
@torch.inference_mode()
def ttft(
    timed: TimedModel,
    workload: Workload,
    tier: options.Tier = "disk",
    tick: Tick = silent,
) -> TtftResult:
    with prompt_bench(timed, workload, parse_tier(tier), tick) as bench:
        adapter, prefix = bench.adapter, CachedPrefix(bench)
        ways: dict[str, Callable[[], object]] = {
            "full": bench.full,
            "prefix_stock": prefix.stock,
            "reuse": bench.reuse,
        }
        notes = []
        if adapter.fuses:
            ways |= {"prefix_fused": prefix.fused, "blend": bench.blend}
        else:
            ways["blend"] = partial(bench.compose, workload.ratio)
            notes.append(RUNS)
        timers = {name: bench.timer(way) for name, way in ways.items()}
        timings = time_ways(timers, workload.rounds, tick)
        tick("measuring memory")
        peaks = {name: peak_bytes(way, adapter.device) for name, way in ways.items()}
        if adapter.fuses:
            counts = bench.blend()[1].counts()
            workload = replace(workload, ratio=counts.ratio)
            charged, floor = counts.charged_ratio, bench.floor_speedup(counts)
        else:
            made = bench.compose(workload.ratio)[1]
            recomputed = sum(made.recomputed)
            charged = recomputed / (workload.chunks * workload.chunk_tokens)
            workload = replace(workload, ratio=charged, policy="query")
            rows = recomputed + workload.question_tokens + made.scouted_tokens
            floor = bench.prompt_tokens / rows
    return TtftResult(
        **conditions(adapter, workload, bench.there.tier.name),
        prompt_tokens=bench.prompt_tokens,
        charged_ratio=charged,
        ms=timings,
        speedup=timings["full"].median / timings["blend"].median,
        floor_speedup=floor,
        kv_bytes=bench.kv_bytes,
        state_bytes=bench.state_bytes,
        peak_bytes=peaks,
        notes=tuple(notes),
    )
