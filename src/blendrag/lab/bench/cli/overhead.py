"""``blendrag bench overhead``: operators, Python time and time a layer, beside a stock prefill's."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from blendrag.config import DEFAULT_POLICY
from blendrag.lab.bench.cli import options, output


def overhead(
    context: typer.Context,
    geometry: options.Geometry = "deep",
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    chunks: Annotated[str, typer.Option(help="Chunks in the prompt, comma-separated.")] = "6,20",
    chunk_tokens: options.Count = 32,
    question_tokens: options.Count = 16,
    policies: Annotated[str, typer.Option(help="Selection policies, comma-separated.")] = (
        f"reuse,{DEFAULT_POLICY},hkvd"
    ),
    ratio: options.Ratio = 0.15,
    rounds: options.Count = 9,
    as_json: options.Json = False,
) -> None:
    """Operators, Python time and time a layer of a request, on a model so small that nothing else shows."""
    from blendrag.lab.bench.geometry import bench_adapter
    from blendrag.lab.bench.overhead import run_overhead
    from blendrag.lab.bench.workload import Workload, whole_numbers

    counts = whole_numbers(chunks, "numbers of chunks", "6,20")
    names = list(dict.fromkeys(name.strip() for name in policies.split(",")))
    adapter = bench_adapter(geometry, None, dtype, device)
    workload = Workload(1, chunk_tokens, question_tokens, ratio, rounds=rounds)
    with options.status("encoding the chunks") as status:
        result = run_overhead(adapter, workload, counts, names, status.update)
    if as_json:
        output.print_json(asdict(result), context, adapter)
        return
    table = Table(
        title=f"{result.model}, {result.layers} layers, {result.dtype}, chunks of {result.chunk_tokens} "
        f"tokens, r = {result.ratio:g}, {result.device}, KV from memory"
    )
    for column in ("way", "chunks", "operators", "of stock's", "ms", "host ms", "µs a layer"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for row in result.rows:
        table.add_row(
            row.way,
            str(row.chunks),
            f"{row.operators:,}",
            f"{row.over_stock:.2f}×",
            f"{row.ms:.1f}",
            f"{row.host_ms:.1f}",
            f"{row.layer_us:.0f}",
        )
    Console().print(table)
