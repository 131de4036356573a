"""``blendrag bench throughput``: first tokens per second of full, reuse and blend by batch size.

Every way answers the same requests at every batch size. Stock prefill takes a batch as one padded batch;
reuse and blend take it as one packed sequence (:mod:`blendrag.fusor.pack`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer

from blendrag.errors import InvalidInputError
from blendrag.fusor import PackedPrompt, Prefilled
from blendrag.lab.bench import options
from blendrag.lab.bench.geometry import TimedModel
from blendrag.lab.bench.rounds import Tick, Timing, silent, time_ways
from blendrag.lab.bench.tiers import parse_tier, tier_store
from blendrag.lab.bench.workload import (
    NEW_TOKENS,
    REUSE,
    BlendResult,
    StoredChunks,
    Workload,
    conditions,
    prompt_of,
    random_prompt,
    stock_prefill,
    whole_numbers,
)
from blendrag.lab.tables import ResultTable, spread, times
from blendrag.model import ModelAdapter
from blendrag.store import KVStore
from blendrag.text.prompt import SegmentedPrompt

#: Questions differ in length by up to this share, so that batches need padding.
SHORTER = 0.5
WAYS = ("full", "reuse", "blend")


@dataclass(frozen=True)
class ThroughputRow:
    """One way at one batch size."""

    way: str
    batch_size: int
    first_tokens_per_s: float
    """Of the median round."""
    spread: tuple[float, float]
    """Lowest and highest."""
    over_alone: float
    """Against the same way at batch size 1."""


@dataclass(frozen=True, kw_only=True)
class ThroughputResult(BlendResult):
    """One run."""

    requests: int
    prompt_tokens: tuple[int, int]
    """Of the shortest and the longest prompt."""
    rows: tuple[ThroughputRow, ...]


def throughput_table(result: ThroughputResult) -> ResultTable:
    """A row for each batch size."""
    low, high = result.prompt_tokens
    found = {(row.way, row.batch_size): row for row in result.rows}
    ways, sizes = (list(dict.fromkeys(part)) for part in zip(*found, strict=True))

    def cell(row: ThroughputRow) -> str:
        return f"{spread(row.first_tokens_per_s, row.spread)}, {times(row.over_alone)}"

    return ResultTable(
        ("batch size", *(f"{way}: first tokens/s (lowest to highest), over batch size 1" for way in ways)),
        [(str(size), *(cell(found[way, size]) for way in ways)) for size in sizes],
        f"{result.requests} prompts of {low:,} to {high:,} tokens: {result.about}",
    )  # fmt: skip


class ThroughputBench:
    """Requests over chunks in a store, and a method for each way."""

    def __init__(
        self, adapter: ModelAdapter, workload: Workload, requests: int, store: KVStore
    ) -> None:
        self.adapter, self._stored = adapter, StoredChunks(adapter, workload, store)
        self.plans = _plans(random_prompt(adapter, workload), requests)
        self._stored.put(segment.stored_ids for segment in self.plans[0].chunks)

    def check(self, batch_sizes: Sequence[int]) -> None:
        """Raise :class:`InvalidInputError` for sizes that this model cannot batch."""
        if max(batch_sizes) > 1 and not self._stored.fusor.packs:
            raise InvalidInputError(
                f"batch sizes {', '.join(map(str, batch_sizes))}: the attention of "
                f"{self.adapter.model_id} takes masks, so its prompts cannot be packed; use only 1"
            )

    def full(self, batch_size: int) -> list[int]:
        """Stock prefill of padded batches; a batch of one is not padded."""
        tokens: list[int] = []
        for plans in self._batches(batch_size):
            ids, mask = _padded([plan.ids for plan in plans], self.adapter.device)
            if len(plans) == 1:
                tokens.append(stock_prefill(self.adapter, ids))
                continue
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            out = self.adapter.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True,
                logits_to_keep=1,
            )  # fmt: skip
            tokens += out.logits[:, -1].argmax(-1).tolist()
        return tokens

    def reuse(self, batch_size: int) -> list[int]:
        """Load all chunks and compute only the questions."""
        return self.blend(batch_size, **REUSE)

    def blend(self, batch_size: int, **options: Any) -> list[int]:
        """Load all chunks and recompute as the workload says; ``options`` as in ``opened``."""
        tokens: list[int] = []
        for plans in self._batches(batch_size):
            with ExitStack() as stack:
                prompts = []
                for plan in plans:
                    opened = self._stored.opened(plan, **options)
                    request = stack.enter_context(opened).request(len(plan.ids))
                    ids = torch.tensor([plan.ids], device=self.adapter.device)  # [1, N]
                    prompts.append(PackedPrompt(ids, request, NEW_TOKENS))
                tokens += self._first_tokens(prompts)
        return tokens

    def _first_tokens(self, prompts: Sequence[PackedPrompt]) -> list[int]:
        if len(prompts) == 1:
            return [self._stored.prefill(prompts[0].ids, prompts[0].request)[0]]
        fusor = self._stored.fusor
        prefilled: list[Prefilled] = []
        for outcome in fusor.batched_prefill(prompts):
            if isinstance(outcome, Exception):
                raise outcome
            prefilled.append(outcome)
        found: list[int] = fusor.first_logits(prefilled).argmax(-1).tolist()
        return found

    def _batches(self, size: int) -> list[Sequence[SegmentedPrompt]]:
        return [self.plans[at : at + size] for at in range(0, len(self.plans), size)]


@options.bench(throughput_table, rounds=3)
@torch.inference_mode()
def throughput(
    timed: TimedModel,
    workload: Workload,
    batch_size: Annotated[
        str, typer.Option(help="Prompts per batch, comma-separated.")
    ] = "1,2,4,8",
    tier: options.Tier = "disk",
    tick: Tick = silent,
) -> ThroughputResult:
    """First tokens per second of full, reuse and blend by batch size."""
    given, wanted = whole_numbers(batch_size, "batch sizes", "1,2,4,8"), parse_tier(tier)
    sizes, requests, adapter = sorted({1, *given}), max(given), timed.adapter
    with tier_store(wanted) as there:
        tick("encoding the chunks")
        bench = ThroughputBench(adapter, workload, requests, there.store)
        bench.check(given)
        ways = {
            (way, size): partial(
                there.milliseconds, partial(getattr(bench, way), size), adapter.device
            )
            for size in sizes
            for way in WAYS
        }
        timings = time_ways(ways, workload.rounds, tick)
    lengths = [len(plan.ids) for plan in bench.plans]
    return ThroughputResult(
        **conditions(adapter, workload, tier),
        requests=requests,
        prompt_tokens=(min(lengths), max(lengths)),
        rows=tuple(_row(way, size, requests, timings) for way, size in ways),
    )


def _row(
    way: str, size: int, requests: int, timings: dict[tuple[str, int], Timing]
) -> ThroughputRow:
    timing = timings[way, size]
    return ThroughputRow(
        way=way,
        batch_size=size,
        first_tokens_per_s=1e3 * requests / timing.median,
        spread=(1e3 * requests / timing.high, 1e3 * requests / timing.low),
        over_alone=timings[way, 1].median / timing.median,
    )


def _plans(first: SegmentedPrompt, requests: int) -> list[SegmentedPrompt]:
    """The chunks of ``first`` in different orders, with questions of different lengths and words."""
    *chunks, question = first.segments
    plans = []
    for number in range(requests):
        turn = number % len(chunks)
        shorter = round(SHORTER * len(question.ids) * (number % 4) / 4)
        asked = question.ids[shorter:]
        asked = (*asked[number % len(asked) :], *asked[: number % len(asked)])
        turned = ((str(each.chunk_id), each.ids) for each in (*chunks[turn:], *chunks[:turn]))
        plans.append(prompt_of(turned, asked))
    return plans


def _padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask ``[B, N]``, with padding before the prompts."""
    longest = max(len(ids) for ids in prompts)
    ids = torch.zeros((len(prompts), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)
