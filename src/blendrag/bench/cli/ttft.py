"""``blendrag bench ttft``: time to first token of every mode, side by side."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from blendrag.bench.cli import options
from blendrag.config import DEFAULT_POLICY, UNCALIBRATED_SCHEDULE


def ttft(
    geometry: options.Geometry = None,
    model: options.Model = None,
    chunks: options.Count = 6,
    chunk_tokens: options.Count = 512,
    question_tokens: options.Count = 32,
    ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Recompute ratio r in [0, 1].")
    ] = 0.15,
    policy: options.Policy = DEFAULT_POLICY,
    schedule: options.Schedule = UNCALIBRATED_SCHEDULE,
    rounds: options.Count = 5,
    tier: options.Tier = "disk",
    encoding: options.Encoding = "native",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Time to first token of full, prefix, reuse and blend, side by side."""
    from blendrag.bench.geometry import bench_adapter
    from blendrag.bench.tiers import parse_tier
    from blendrag.bench.ttft import run_ttft
    from blendrag.bench.workload import Workload

    workload = Workload(
        chunks, chunk_tokens, question_tokens, ratio, policy, schedule, rounds, encoding
    )
    wanted = parse_tier(tier)
    adapter = bench_adapter(geometry, model, dtype, device)
    with options.status("loading") as status:
        result = run_ttft(adapter, workload, lambda text: status.update(text), wanted)
    if as_json:
        options.print_json(asdict(result))
        return
    rows = [
        ("full (stock prefill)", result.full_ms, "full"),
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
