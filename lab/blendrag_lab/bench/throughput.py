"""``blendrag bench throughput``: first tokens per second of full, reuse and blend by batch size.

Every way answers the same requests at every batch size. Stock prefill takes a batch as one padded batch;
reuse and blend take it as one packed sequence (:mod:`blendrag.fusor.pack`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch.nn.utils.rnn import pad_sequence

from blendrag.errors import InvalidInputError
from blendrag.fusor import PackedPrompt, Prefilled
from blendrag.text.prompt import SegmentedPrompt
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.rounds import Tick, silent, time_ways
from blendrag_lab.bench.tiers import parse_tier
from blendrag_lab.bench.workload import (
    NEW_TOKENS,
    REUSE,
    BlendResult,
    PromptBench,
    Workload,
    conditions,
    prompt_bench,
    prompt_of,
    stock_prefill,
    whole_numbers,
)
from blendrag_lab.tables import ResultTable, spread, times

#: Questions differ in length by up to this share, so that batches need padding.
SHORTER = 0.5


@dataclass(frozen=True)
class ThroughputRow:
    way: str
    batch_size: int
    first_tokens_per_s: float
    """The median round; ``spread`` has the lowest and highest."""
    spread: tuple[float, float]
    over_alone: float
    """Against the same way at batch size 1."""


@dataclass(frozen=True, kw_only=True)
class ThroughputResult(BlendResult):
    requests: int
    prompt_tokens: tuple[int, int]
    """The length of the shortest and of the longest prompt."""
    rows: tuple[ThroughputRow, ...]


def throughput_table(result: ThroughputResult) -> ResultTable:
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


Batches = Sequence[Sequence[SegmentedPrompt]]


def full(bench: PromptBench, batches: Batches) -> list[int]:
    """First tokens of a stock prefill of padded batches; a batch of one is not padded."""
    adapter, tokens = bench.adapter, []
    for plans in batches:
        rows = [torch.tensor(plan.ids) for plan in plans]
        ids = _padded(rows).to(adapter.device)  # [B, N]
        if len(plans) == 1:
            tokens.append(stock_prefill(adapter, ids))
            continue
        mask = _padded([torch.ones_like(row) for row in rows]).to(adapter.device)  # [B, N]
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        out = adapter.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        tokens += out.logits[:, -1].argmax(-1).tolist()
    return tokens


def blend(bench: PromptBench, batches: Batches, **options: Any) -> list[int]:
    """First tokens over loaded chunks, recomputed as the workload or ``options`` say."""
    tokens: list[int] = []
    for plans in batches:
        with ExitStack() as stack:
            prompts = []
            for plan in plans:
                opened = stack.enter_context(bench.opened(plan, **options))
                ids = torch.tensor([plan.ids], device=bench.adapter.device)  # [1, N]
                prompts.append(PackedPrompt(ids, opened.request(len(plan.ids)), NEW_TOKENS))
            if len(prompts) == 1:
                tokens.append(bench.prefill(prompts[0].ids, prompts[0].request)[0])
                continue
            prefilled: list[Prefilled] = []
            for outcome in bench.fusor.batched_prefill(prompts):
                if isinstance(outcome, Exception):
                    raise outcome
                prefilled.append(outcome)
            tokens += bench.fusor.first_logits(prefilled).argmax(-1).tolist()
    return tokens


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
    given = whole_numbers(batch_size, "batch sizes", "1,2,4,8")
    with prompt_bench(timed, workload, parse_tier(tier), tick) as bench:
        if max(given) > 1 and not bench.fusor.packs:
            raise InvalidInputError(
                f"batch sizes {batch_size}: the attention of {bench.adapter.model_id} takes masks, so its "
                "prompts cannot be packed; use only 1"
            )
        requests = max(given)
        plans = make_plans(bench.prompt, requests)
        ways: dict[tuple[str, int], Callable[[], float]] = {}
        for size in sorted({1, *given}):
            batches = [plans[at : at + size] for at in range(0, requests, size)]
            ways["full", size] = bench.timer(full, bench, batches)
            ways["reuse", size] = bench.timer(blend, bench, batches, **REUSE)
            ways["blend", size] = bench.timer(blend, bench, batches)
        timings = time_ways(ways, workload.rounds, tick)
    lengths = [len(plan.ids) for plan in plans]
    return ThroughputResult(
        **conditions(bench.adapter, workload, tier),
        requests=requests,
        prompt_tokens=(min(lengths), max(lengths)),
        rows=tuple(
            ThroughputRow(
                way=way,
                batch_size=size,
                first_tokens_per_s=1e3 * requests / ms.median,
                spread=(1e3 * requests / ms.high, 1e3 * requests / ms.low),
                over_alone=timings[way, 1].median / ms.median,
            )
            for (way, size), ms in timings.items()
        ),
    )


def make_plans(first: SegmentedPrompt, requests: int) -> list[SegmentedPrompt]:
    """The chunks of ``first`` in different orders, with questions of different lengths and words."""
    *segments, question = first.segments
    chunks = [(str(segment.chunk_id), segment.ids) for segment in segments]
    plans = []
    for number in range(requests):
        turn = number % len(chunks)
        shorter = round(SHORTER * len(question.ids) * (number % 4) / 4)
        asked = question.ids[shorter:]
        asked = (*asked[number % len(asked) :], *asked[: number % len(asked)])
        plans.append(prompt_of([*chunks[turn:], *chunks[:turn]], asked))
    return plans


def _padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows as ``[B, N]``, with zeros before the shorter ones."""
    return pad_sequence(list(rows), batch_first=True, padding_side="left")
