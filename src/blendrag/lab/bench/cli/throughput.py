"""``blendrag bench throughput``: first tokens per second by batch size."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from blendrag.lab.bench.cli import options, output
from blendrag.lab.bench.cli.spread import spread

if TYPE_CHECKING:
    from blendrag.lab.bench.throughput_results import ThroughputResult


@spread
def throughput(
    context: typer.Context,
    timed: options.Timed,
    work: options.Work,
    batch_size: Annotated[
        str, typer.Option(help="Prompts prefilled together, comma-separated.")
    ] = "1,2,4,8",
    ratio: options.Ratio = 0.15,
    rounds: options.Count = 3,
    tier: options.Tier = "disk",
    as_json: options.Json = False,
) -> None:
    """First tokens per second of full, reuse and blend by batch size."""
    from blendrag.lab.bench.throughput import parse_batch_sizes, run_throughput
    from blendrag.lab.bench.tiers import parse_tier

    sizes, wanted = parse_batch_sizes(batch_size), parse_tier(tier)
    adapter = timed.adapter()
    with options.status("loading") as status:
        result = run_throughput(adapter, work.at(ratio, rounds), sizes, status.update, wanted)
    if as_json:
        output.print_json(asdict(result), context, adapter)
    else:
        _print(result)


def _print(result: ThroughputResult) -> None:
    low, high = result.prompt_tokens
    table = Table(
        title=f"{result.model}, {result.dtype}, {result.requests} prompts of {low} to {high} tokens, "
        f"{result.policy}, r = {result.ratio:g}, {result.device}, {result.encoding} KV from {result.tier}"
    )
    names = (
        "mode",
        "batch size",
        "first tokens/s",
        "lowest",
        "highest",
        "batch ms",
        "over full",
        "over 1",
    )
    for column in names:
        table.add_column(column, justify="left" if column == "mode" else "right")
    for row in result.rows:
        table.add_row(
            row.way,
            str(row.batch_size),
            f"{row.first_tokens_per_s:.2f}",
            *(f"{rate:.2f}" for rate in row.spread),
            f"{row.batch_ms:.0f}",
            f"{row.over_full:.2f}×",
            f"{row.over_alone:.2f}×",
        )
    Console().print(table)
    Console().print(
        f"{result.rounds} rounds; full: stock prefill, in padded batches; reuse and blend: packed into one "
        "sequence"
    )
