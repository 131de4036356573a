"""First tokens per second by batch size: stock prefill, full reuse and blend in one run.

The same requests are answered by every way at every batch size, in groups of that many, so that all
figures are of the same work: chunks of one pool in another order each, and questions of different lengths.
Stock prefill takes a group as one padded batch; reuse and blend take it as one packed sequence
(:mod:`blendrag.fusor.pack`). Rounds are interleaved. Inside and outside of the time is what
:mod:`blendrag.lab.bench.ttft` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from blendrag.config import Mode
from blendrag.errors import InvalidInputError
from blendrag.fusor import Fusor, PackedPrompt, Prefilled
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.lab.bench.rounds import Timing, interleaved
from blendrag.lab.bench.throughput_results import ThroughputResult, ThroughputRow
from blendrag.lab.bench.tiers import ON_DISK, BenchTier, tier_store
from blendrag.lab.bench.workload import NEW_TOKENS, PREFIX_IDS, Workload, random_plan, whole_numbers
from blendrag.model import ModelAdapter
from blendrag.planning.controller import Controller, PlanOptions
from blendrag.store import KVStore
from blendrag.store.identity import chunk_key
from blendrag.text.prompt import PromptPlan, Segment

#: Questions differ in length by up to this share, so that padding has something to pad.
SHORTER = 0.5
WAYS = ("full", "reuse", "blend")


class ThroughputBench:
    """Requests over chunks in a store, and one callable for each way."""

    def __init__(
        self, adapter: ModelAdapter, workload: Workload, requests: int, store: KVStore
    ) -> None:
        adapter.require_blendable()
        self.adapter = adapter
        self.workload = workload
        self._fusor = Fusor(adapter)
        namespace = adapter.identity.encoded(workload.encoding).namespace
        self._controller = Controller(adapter, store, namespace, PREFIX_IDS, 1, workload.encoding)
        self.plans = _plans(random_plan(adapter, workload), requests)
        for segment in self.plans[0].chunks:
            kv = adapter.encode(PREFIX_IDS, segment.stored_ids)
            kept = replace(kv, layout=kv.layout.encoded(workload.encoding))
            store.put(namespace, chunk_key(namespace, PREFIX_IDS, segment.stored_ids), kept)

    def check(self, batch_sizes: Sequence[int]) -> None:
        """Raise :class:`InvalidInputError` for sizes that cannot be measured."""
        if max(batch_sizes) > 1 and not self._fusor.packs:
            raise InvalidInputError(
                f"batch sizes {', '.join(map(str, batch_sizes))}, but the attention of "
                f"{self.adapter.model_id} takes masks, so its prompts are prefilled one after another; "
                "leave out all but 1"
            )

    def full(self, batch_size: int) -> list[int]:
        """Stock prefill of padded batches, last logits only; nothing is padded in a batch of one."""
        tokens: list[int] = []
        for plans in _groups(self.plans, batch_size):
            ids, mask = _padded([plan.ids for plan in plans], self.adapter.device)
            given = (
                {} if len(plans) == 1 else {"attention_mask": mask, "position_ids": _places(mask)}
            )
            out = self.adapter.model(input_ids=ids, use_cache=True, logits_to_keep=1, **given)
            tokens += out.logits[:, -1].argmax(-1).tolist()
        return tokens

    def reuse(self, batch_size: int) -> list[int]:
        """Load from the store, compute the questions only."""
        return self._loaded(batch_size, "reuse", "reuse", 0.0)

    def blend(self, batch_size: int) -> list[int]:
        """Load from the store, recompute by the workload's policy and ratio."""
        return self._loaded(batch_size, "blend", self.workload.policy, self.workload.ratio)

    def _loaded(self, batch_size: int, mode: Mode, policy: str, ratio: float) -> list[int]:
        tokens: list[int] = []
        for plans in _groups(self.plans, batch_size):
            with ExitStack() as opened:
                prompts = [self._prompt(plan, mode, policy, ratio, opened) for plan in plans]
                tokens += self._first_tokens(prompts)
        return tokens

    def _prompt(
        self, plan: PromptPlan, mode: Mode, policy: str, ratio: float, opened: ExitStack
    ) -> PackedPrompt:
        schedule = Schedule.parse(self.workload.schedule)
        options = PlanOptions(mode, make_policy(policy), lambda _: schedule, ratio)
        load = self._controller.plan(plan, options)
        opened.callback(load.close)
        if len(load.spans) != self.workload.chunks:
            raise InvalidInputError("a bench chunk is not in the store any more; run again")
        request = load.request(len(plan.ids))
        return PackedPrompt(
            torch.tensor([plan.ids], device=self.adapter.device), request, NEW_TOKENS
        )

    def _first_tokens(self, prompts: Sequence[PackedPrompt]) -> list[int]:
        if len(prompts) == 1:
            (alone,) = prompts
            logits, _, _ = self._fusor.prefill(alone.ids, alone.request, NEW_TOKENS)
            return [int(logits[0, -1].argmax())]
        prefilled: list[Prefilled] = []
        for outcome in self._fusor.batched_prefill(prompts):
            if isinstance(outcome, Exception):
                raise outcome
            prefilled.append(outcome)
        found: list[int] = self._fusor.first_logits(prefilled).argmax(-1).tolist()
        return found


@torch.inference_mode()
def run_throughput(
    adapter: ModelAdapter,
    workload: Workload,
    batch_sizes: Sequence[int],
    tick: Callable[[str], None] = lambda text: None,
    tier: BenchTier = ON_DISK,
) -> ThroughputResult:
    """Interleaved rounds of every way at every batch size; as many requests as the largest batch has.

    Raises :class:`InvalidInputError`.
    """
    requests = max(batch_sizes)
    with tier_store(tier) as there:
        tick("encoding the chunks")
        bench = ThroughputBench(adapter, workload, requests, there.store)
        bench.check(batch_sizes)
        sizes = sorted({1, *batch_sizes})
        ways = {(way, size): partial(getattr(bench, way), size) for size in sizes for way in WAYS}
        tick("warming up")
        for way in ways.values():
            way()
        there.settle()
        named = {f"{way} {size}": call for (way, size), call in ways.items()}
        timings = interleaved(
            named, workload.rounds, adapter.device, tick, lambda name: there.prepare()
        )
    lengths = [len(plan.ids) for plan in bench.plans]
    return ThroughputResult(
        adapter.model_id,
        adapter.layout.dtype,
        str(adapter.device),
        torch.get_num_threads(),
        requests,
        (min(lengths), max(lengths)),
        workload.policy,
        workload.ratio,
        tier.name,
        workload.encoding,
        workload.rounds,
        tuple(_row(way, size, requests, timings) for way, size in ways),
    )


def _row(way: str, size: int, requests: int, timings: dict[str, Timing]) -> ThroughputRow:
    timing = timings[f"{way} {size}"]
    batches = -(-requests // size)
    return ThroughputRow(
        way,
        size,
        1e3 * requests / timing.median,
        (1e3 * requests / timing.high, 1e3 * requests / timing.low),
        timing.median / batches,
        timings["full 1"].median / timing.median,
        timings[f"{way} 1"].median / timing.median,
    )


def parse_batch_sizes(text: str) -> list[int]:
    """``"1,2,4"``; raises :class:`InvalidInputError`."""
    return whole_numbers(text, "batch sizes", "1,2,4,8")


def _plans(first: PromptPlan, requests: int) -> list[PromptPlan]:
    """The chunks of ``first`` in another order each, and questions that differ in length and words."""
    *chunks, question = first.segments
    plans = []
    for number in range(requests):
        turn = number % len(chunks)
        shorter = round(SHORTER * len(question.ids) * (number % 4) / 4)
        asked = question.ids[shorter:]
        asked = (*asked[number % len(asked) :], *asked[: number % len(asked)])
        segments, position = [], 0
        for segment in (*chunks[turn:], *chunks[:turn], replace(question, ids=asked)):
            segments.append(replace(segment, position=position))
            position += len(segment.ids)
        plans.append(PromptPlan(tuple[Segment, ...](segments)))
    return plans


def _groups(plans: Sequence[PromptPlan], size: int) -> list[Sequence[PromptPlan]]:
    return [plans[at : at + size] for at in range(0, len(plans), size)]


def _padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask ``[B, N]``, padding before the prompts."""
    longest = max(len(ids) for ids in prompts)
    ids = torch.zeros((len(prompts), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _places(mask: torch.Tensor) -> torch.Tensor:
    """Positions of the tokens behind the padding."""
    return (mask.cumsum(-1) - 1).clamp_min(0)
