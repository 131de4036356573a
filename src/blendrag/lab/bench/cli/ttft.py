"""``blendrag bench ttft``: time to first token of every mode, side by side."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from blendrag.lab.bench.cli import options, output
from blendrag.lab.bench.cli.spread import spread


@spread
def ttft(
    context: typer.Context,
    timed: options.Timed,
    work: options.Work,
    ratio: options.Ratio = 0.15,
    rounds: options.Count = 5,
    tier: options.Tier = "disk",
    compiled: Annotated[
        bool, typer.Option("--compiled", help="And the stock prefill through torch.compile.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Time to first token of full, prefix, reuse and blend, side by side."""
    from blendrag.lab.bench.tiers import parse_tier
    from blendrag.lab.bench.ttft import run_ttft

    wanted = parse_tier(tier)
    adapter = timed.adapter()
    with options.status("loading") as status:
        result = run_ttft(adapter, work.at(ratio, rounds), status.update, wanted, compiled)
    if as_json:
        output.print_json(asdict(result), context, adapter)
        return
    rows = [
        ("full (stock prefill)", result.full_ms, "full"),
        ("full, compiled", result.full_compiled_ms, "full_compiled"),
        ("prefix, over a stock cache", result.prefix_stock_ms, "prefix_stock"),
        ("prefix, through the fusor", result.prefix_fused_ms, "prefix_fused"),
        (f"blend r = {result.ratio:.2f}", result.blend_ms, "blend"),
        ("reuse", result.reuse_ms, "reuse"),
    ]
    table = Table(
        title=f"{result.model}, {result.dtype}, {result.prompt_tokens} tokens, {result.device}, "
        f"{result.encoding} KV from {result.tier}"
    )
    for column in ("mode", "TTFT ms", "lowest", "highest", "speedup", "peak MB"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for name, ms, key in rows:
        if ms is None:
            continue
        low, high = result.spread_ms[key]
        peak = result.peak_bytes[key]
        peak_text = "–" if peak is None else f"{peak / 1e6:.0f}"
        speedup = f"{result.full_ms / ms:.2f}×"
        table.add_row(name, f"{ms:.0f}", f"{low:.0f}", f"{high:.0f}", speedup, peak_text)
    Console().print(table)
    Console().print(
        f"floor at these rows {result.floor_speedup:.2f}×, charged ratio "
        f"{result.charged_ratio:.3f}, KV {result.kv_bytes / 1e6:.0f} MB, {result.rounds} rounds"
    )
    if result.compile_s is not None:
        Console().print(f"compiled in {result.compile_s:.0f} s, before the clock started")
    for note in result.notes:
        Console().print(note)
