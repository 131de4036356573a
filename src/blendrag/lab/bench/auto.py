"""``ratio="auto"`` against every fixed ratio, tier by tier; and predicted beside measured times.

The profile is measured in the same process, by what ``blendrag profile`` measures; a throttled tier enters
it as what it is. Fixed ratios and the automatic one are interleaved, each from opening the chunks to the
first token of ``generate``, as a request runs it. The best fixed ratio is the fastest of those swept, none
below the smallest that the automatic one may take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch

from blendrag.errors import InvalidInputError
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.lab.bench.auto_results import AutoResult, Run, share_close, tier_result
from blendrag.lab.bench.scratch import scratch
from blendrag.lab.bench.tiers import BenchTier, TierStore, tier_store
from blendrag.lab.bench.ttft import TtftBench
from blendrag.lab.bench.workload import PREFIX_IDS, Workload
from blendrag.model import ModelAdapter
from blendrag.planning.controller import PlanOptions
from blendrag.planning.measure import Measure
from blendrag.planning.plan import Plan
from blendrag.planning.profile import DISK, Profile, Tier, conditions_of

Tick = Callable[[str], None]


class AutoBench:
    """Requests over one tier, decided by a profile."""

    def __init__(
        self,
        bench: TtftBench,
        profile: Profile,
        tier: BenchTier,
        min_ratio: float,
    ) -> None:
        self._bench, self._min_ratio = bench, min_ratio
        self._controller = replace(bench.controller, profile=with_tier(profile, tier))

    def run(self, ratio: float | None) -> Run:
        """At a fixed ratio, or at the automatic one (``None``)."""
        bench = self._bench
        schedule = Schedule.parse(bench.workload.schedule)
        options = PlanOptions(
            "blend",
            make_policy(bench.workload.policy),
            lambda _: schedule,
            self._min_ratio if ratio is None else ratio,
            is_auto=ratio is None,
        )
        began = self._now()
        plan = self._controller.plan(bench.prompt, options)
        planned_s = self._now() - began
        with closing(plan):
            if plan.missing:
                raise InvalidInputError("a bench chunk is not in the store any more; run again")
            self._first_token(plan)
        seconds = self._now() - began
        if plan.forecast is None:
            raise InvalidInputError(f"nothing was predicted: {' '.join(plan.notes)}")
        # from opening the chunks on, as an engine predicts
        predicted_s = planned_s + plan.forecast.ttft_s
        return Run(seconds, predicted_s, plan.ratio, len(plan.spans))

    def _first_token(self, plan: Plan) -> None:
        bench = self._bench
        if not plan.spans:
            self._generate()
            return
        request = plan.request(bench.prompt_tokens)
        cache = bench.fusor.new_cache(bench.prompt_tokens, 1)
        with bench.adapter.lock, bench.fusor.fuse(cache, request, last_row_only=True):
            self._generate(past_key_values=cache)

    def _generate(self, **more: Any) -> None:
        bench = self._bench
        bench.adapter.model.generate(
            bench.ids,
            attention_mask=torch.ones_like(bench.ids),
            max_new_tokens=1,
            do_sample=False,
            pad_token_id=0,
            **more,
        )

    def _now(self) -> float:
        if self._bench.adapter.device.type == "cuda":
            torch.cuda.synchronize(self._bench.adapter.device)
        return time.perf_counter()


def with_tier(profile: Profile, tier: BenchTier) -> Profile:
    """``profile``, in which a throttled tier is one of those measured."""
    if tier.bytes_per_s is None:
        return profile
    disk = profile.tier(DISK)
    assert disk is not None
    # The read itself is a warm disk's, and is over before the device has delivered.
    busy = disk.busy * min(1.0, tier.bytes_per_s / disk.bytes_per_s)
    slow = Tier(tier.profiled, min(tier.bytes_per_s, disk.bytes_per_s), busy=busy)
    return replace(profile, tiers=(*profile.tiers, slow))


@torch.inference_mode()
def run_auto(
    adapter: ModelAdapter,
    workload: Workload,
    tiers: Sequence[BenchTier],
    ratios: Sequence[float],
    min_ratio: float,
    tick: Tick = lambda text: None,
) -> AutoResult:
    """Measure a profile, then every tier. Raises :class:`InvalidInputError` without a ratio to compare."""
    swept = sorted({ratio for ratio in ratios if ratio >= min_ratio})
    if not swept or not tiers:
        raise InvalidInputError(
            f"ratios {', '.join(map(str, ratios)) or 'none'} hold none of {min_ratio} or more; name some "
            "that the automatic ratio could be compared with"
        )
    asked: list[float | None] = [*swept, None]
    with ExitStack() as stores:
        benches: list[tuple[AutoBench, TierStore]] = []
        profile: Profile | None = None
        tokens = 0
        for tier in tiers:
            tick(f"encoding the chunks for tier {tier.name}")
            there = stores.enter_context(tier_store(tier))
            bench = TtftBench(adapter, workload, there.store)
            profile = profile or measure_profile(bench, tick)
            tokens = bench.prompt_tokens
            benches.append((AutoBench(bench, profile, tier, min_ratio), there))
        runs = _rounds(benches, asked, workload.rounds, tick)
    assert profile is not None  # there is a tier
    found = tuple(
        tier_result(tier, [(ratio, runs[i, ratio]) for ratio in asked])
        for i, tier in enumerate(tiers)
    )
    every = [run for each in runs.values() for run in each]
    automatic = [run for (_, ratio), each in runs.items() if ratio is None for run in each]
    return AutoResult(
        model=adapter.model_id,
        device=str(adapter.device),
        policy=workload.policy,
        encoding=workload.encoding,
        prompt_tokens=tokens,
        min_ratio=min_ratio,
        tiers=found,
        close=share_close(every),
        auto_close=share_close(automatic),
        requests=len(every),
        rounds=workload.rounds,
        profile=profile.as_dict(),
    )


def measure_profile(bench: TtftBench, tick: Tick) -> Profile:
    """What ``blendrag profile`` measures, of this model and of the disk of the scratch store."""
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


def _rounds(
    benches: Sequence[tuple[AutoBench, TierStore]],
    asked: Sequence[float | None],
    rounds: int,
    tick: Tick,
) -> dict[tuple[int, float | None], list[Run]]:
    """Every tier and ratio once a round, after one that warms up.

    Each round begins with another ratio, so that the automatic one is not always last.
    """
    runs: dict[tuple[int, float | None], list[Run]] = {
        (i, ratio): [] for i in range(len(benches)) for ratio in asked
    }
    for number in range(rounds + 1):
        tick(f"round {number} of {rounds}" if number else "warming up")
        first = number % len(asked)
        for i, (bench, there) in enumerate(benches):
            for ratio in (*asked[first:], *asked[:first]):
                there.prepare()
                run = bench.run(ratio)
                if number:
                    runs[i, ratio].append(run)
        for _, there in benches:
            there.settle()
    return runs
