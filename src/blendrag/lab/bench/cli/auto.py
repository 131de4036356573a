"""``blendrag bench auto``: the automatic ratio against fixed ones, predictions beside measurements."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from blendrag.lab.bench.cli import options, output
from blendrag.lab.bench.cli.spread import spread

if TYPE_CHECKING:
    from blendrag.lab.bench.auto_results import AutoResult


@spread
def auto(
    context: typer.Context,
    timed: options.Timed,
    work: options.Work,
    tiers: Annotated[
        str, typer.Option(help="Comma-separated: memory, disk, cold or throughputs.")
    ] = "memory,disk,cold,1GB/s,0.5GB/s",
    ratios: Annotated[
        str, typer.Option(help="Fixed ratios to compare with, comma-separated.")
    ] = "0.15,0.2,0.3,0.5,0.7,1.0",
    min_ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The least that is ever recomputed.")
    ] = 0.15,
    rounds: options.Count = 5,
    as_json: options.Json = False,
) -> None:
    """Ratio auto against the best fixed ratio on each tier, and its predictions beside what was measured."""
    from blendrag.lab.bench.auto import run_auto
    from blendrag.lab.bench.sweep import parse_ratio
    from blendrag.lab.bench.tiers import parse_tier

    wanted = [parse_tier(text.strip()) for text in tiers.split(",")]
    fixed = [parse_ratio(text.strip()) for text in ratios.split(",")]
    adapter = timed.adapter()
    with options.status("loading") as status:
        result = run_auto(
            adapter, work.at(min_ratio, rounds), wanted, fixed, min_ratio, status.update
        )
    if as_json:
        output.print_json(asdict(result), context, adapter)
    else:
        _print(result)


def _print(result: AutoResult) -> None:
    table = Table(
        title=f"{result.model}, {result.prompt_tokens} tokens, {result.policy}, {result.encoding} KV"
    )
    for column in ("tier", "asked", "ratio", "loaded", "TTFT ms", "lowest", "highest", "predicted"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for tier in result.tiers:
        for row in tier.rows:
            times = (f"{ms:.1f}" for ms in (row.ms, *row.spread_ms, row.predicted_ms))
            table.add_row(tier.tier, row.asked, f"{row.ratio:.2f}", str(row.loaded), *times)
    Console().print(table)
    for tier in result.tiers:
        Console().print(
            f"{tier.tier}: auto takes {tier.relative:.2f} of the best fixed ratio, {tier.best_ratio:.2f}; "
            f"{tier.close:.0%} of predictions within 15%, {tier.auto_close:.0%} of those at ratio auto"
        )
    Console().print(
        f"{result.close:.0%} of {result.requests} predictions within 15%, {result.auto_close:.0%} of those "
        "at ratio auto"
    )
