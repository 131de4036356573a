"""``blendrag bench auto``: ratio ``auto`` against fixed ratios on each tier, and predictions of TTFT.

The profile is measured in the same process, as ``blendrag profile`` does; a throttled tier enters it with its
throughput. Each request runs from opening the chunks to the first token of ``generate``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer

from blendrag.config import AUTO
from blendrag.errors import InvalidInputError
from blendrag.planning.measure import Measure
from blendrag.planning.profile import DISK, Profile, Tier, conditions_of
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.rounds import Tick, Timing, clock, run_rounds, silent
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.tiers import BenchTier, parse_tier
from blendrag_lab.bench.workload import (
    PREFIX_IDS,
    BlendResult,
    PromptBench,
    Workload,
    conditions,
    parse_ratios,
    prompt_bench,
)
from blendrag_lab.tables import ResultTable, table

#: A prediction is close if it is off by at most this share of the measured time.
CLOSE = 0.15


@dataclass(frozen=True)
class AutoRow:
    """One ratio from one tier; medians."""

    ratio: float
    loaded: int
    ms: Timing
    predicted_ms: float
    close: float
    """Share of requests whose prediction is :data:`CLOSE`."""


@dataclass(frozen=True)
class TierResult:
    tier: str
    auto: AutoRow
    fixed: tuple[AutoRow, ...]

    @property
    def close(self) -> float:
        return statistics.fmean(row.close for row in (*self.fixed, self.auto))

    @property
    def best(self) -> AutoRow:
        return min(self.fixed, key=lambda row: row.ms.median)

    @property
    def relative(self) -> float:
        """Time of the automatic ratio over that of the best fixed one."""
        return self.auto.ms.median / self.best.ms.median


@dataclass(frozen=True, kw_only=True)
class AutoResult(BlendResult):
    """One run; ``ratio`` is the smallest automatic one."""

    prompt_tokens: int
    tiers: tuple[TierResult, ...]


def auto_table(result: AutoResult) -> ResultTable:
    close = statistics.fmean(tier.close for tier in result.tiers)
    auto_close = statistics.fmean(tier.auto.close for tier in result.tiers)
    requests = result.rounds * sum(len(tier.fixed) + 1 for tier in result.tiers)
    return table(
        [
            ("tier", lambda tier: tier.tier),
            ("auto: r", lambda tier: f"{tier.auto.ratio:.2f}"),
            ("chunks loaded", lambda tier: str(tier.auto.loaded)),
            ("TTFT ms (lowest to highest)", lambda tier: str(tier.auto.ms)),
            ("predicted ms", lambda tier: f"{tier.auto.predicted_ms:,.0f}"),
            ("best fixed r", lambda tier: f"{tier.best.ratio:.2f}"),
            ("TTFT ms", lambda tier: f"{tier.best.ms.median:,.0f}"),
            ("auto over best", lambda tier: f"{tier.relative:.2f}"),
            ("predictions within 15%", lambda tier: f"{tier.close:.0%}"),
        ],
        result.tiers,
        f"{result.prompt_tokens:,} tokens, smallest ratio {result.ratio:g}: {result.about}",
        [
            f"{close:.0%} of {requests} predictions are within 15%, {auto_close:.0%} of those at ratio "
            "auto."
        ],
    )  # fmt: skip


@dataclass(frozen=True)
class AutoRun:
    """One request: measured and predicted seconds, and its ratio."""

    seconds: float
    predicted_s: float
    ratio: float
    loaded: int
    """Chunks that were loaded, not computed."""

    @property
    def is_close(self) -> bool:
        return abs(self.predicted_s - self.seconds) <= CLOSE * self.seconds


def auto_run(bench: PromptBench, profile: Profile, ratio: float | None) -> AutoRun:
    """One request planned with ``profile``, at a fixed ratio or at the automatic one (``None``)."""
    adapter = bench.adapter
    controller = replace(bench.controller, profile=with_tier(profile, bench.there.tier))
    bench.there.prepare()
    began = clock(adapter.device)
    with bench.opened(
        bench.prompt, controller=controller, ratio=AUTO if ratio is None else ratio
    ) as plan:
        planned_s = clock(adapter.device) - began
        if plan.spans:
            cache = bench.fusor.new_cache(bench.prompt_tokens, 1)
            request = plan.request(bench.prompt_tokens)
            with adapter.lock, bench.fusor.fuse(cache, request, last_row_only=True):
                _generate(bench, past_key_values=cache)
        else:
            _generate(bench)
    seconds = clock(adapter.device) - began
    if plan.forecast is None:
        raise InvalidInputError(f"nothing was predicted: {' '.join(plan.notes)}")
    # From opening the chunks, as an engine predicts.
    return AutoRun(
        seconds, planned_s + plan.forecast.ttft_s, plan.blending.fixed_ratio, len(plan.spans)
    )


def _generate(bench: PromptBench, **more: Any) -> None:
    mask = torch.ones_like(bench.ids)
    bench.adapter.model.generate(
        bench.ids, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0, **more
    )


def with_tier(profile: Profile, tier: BenchTier) -> Profile:
    if tier.bytes_per_s is None:
        return profile
    disk = profile.tier(DISK)
    assert disk is not None
    # The read itself is a warm disk's, and ends before the device would have delivered.
    busy = disk.busy * min(1.0, tier.bytes_per_s / disk.bytes_per_s)
    slow = Tier(tier.name, min(tier.bytes_per_s, disk.bytes_per_s), busy=busy)
    return replace(profile, tiers=(*profile.tiers, slow))


@options.bench(auto_table, ratio=options.OMIT)
@torch.inference_mode()
def auto(
    timed: TimedModel,
    workload: Workload,
    tiers: Annotated[
        str, typer.Option(help="Comma-separated: memory, disk, cold or throughputs.")
    ] = "memory,disk,cold,1GB/s,0.5GB/s",
    ratios: Annotated[
        str, typer.Option(help="Fixed ratios to compare with, comma-separated.")
    ] = "0.15,0.2,0.3,0.5,0.7,1.0",
    min_ratio: Annotated[float, options.number("Smallest automatic ratio.", 0, 1)] = 0.15,
    tick: Tick = silent,
) -> AutoResult:
    wanted = [parse_tier(text.strip()) for text in tiers.split(",")]
    swept = sorted({ratio for ratio in parse_ratios(ratios) if ratio >= min_ratio})
    if not swept:
        raise InvalidInputError(
            f"ratios {ratios} include none of {min_ratio} or more; name some to compare the automatic "
            "ratio with"
        )
    workload = replace(workload, ratio=min_ratio)
    with ExitStack() as stores:
        benches = [
            stores.enter_context(prompt_bench(timed, workload, tier, tick)) for tier in wanted
        ]
        profile = measure_profile(benches[0], tick)
        ways = {
            (tier, ratio): partial(auto_run, bench, profile, ratio)
            for tier, bench in enumerate(benches)
            for ratio in (*swept, None)
        }
        runs = run_rounds(ways, workload.rounds, tick)
    return AutoResult(
        **conditions(timed.adapter, workload, tiers),
        prompt_tokens=workload.prompt_tokens,
        tiers=tuple(
            tier_result(tier, {ratio: runs[i, ratio] for ratio in (*swept, None)})
            for i, tier in enumerate(wanted)
        ),
    )


def measure_profile(bench: PromptBench, tick: Tick) -> Profile:
    """Measure what ``blendrag profile`` measures, for this model and the disk of temporary files."""
    adapter, workload = bench.adapter, bench.workload
    namespace = adapter.identity.encoded(workload.encoding).namespace
    measure = Measure(
        adapter,
        bench.fusor,
        workload.encoding,
        PREFIX_IDS,
        workload.chunk_tokens,
        lambda call: call(),
        lambda what, done, steps: tick(f"profile: {what}, {done} of {steps} steps done"),
    )
    with scratch() as root:
        return measure.profile(conditions_of(adapter, namespace), root)


def tier_result(tier: BenchTier, runs: Mapping[float | None, Sequence[AutoRun]]) -> TierResult:
    """What follows from the runs of one tier by ratio; ``None`` is the automatic one."""
    return TierResult(
        tier=tier.name,
        auto=_row(runs[None]),
        fixed=tuple(_row(each) for ratio, each in runs.items() if ratio is not None),
    )


def _row(runs: Sequence[AutoRun]) -> AutoRow:
    return AutoRow(
        ratio=statistics.median(run.ratio for run in runs),
        loaded=min(run.loaded for run in runs),
        ms=Timing.of([1e3 * run.seconds for run in runs]),
        predicted_ms=1e3 * statistics.median(run.predicted_s for run in runs),
        close=statistics.fmean(run.is_close for run in runs),
    )
