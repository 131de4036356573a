"""``blendrag bench store``: the KV store beside raw reads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from blendrag.lab.bench.cli import options, output

if TYPE_CHECKING:
    from blendrag.lab.bench.store import StoreResult


def store(
    context: typer.Context,
    geometry: options.Geometry = None,
    layers: options.Size = None,
    heads: options.Size = None,
    dim: options.Size = None,
    tokens: options.Count = 512,
    chunks: options.Count = 6,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    rows: Annotated[
        int, typer.Option(min=1, help="Rows of the index in which a key is missing.")
    ] = 1_000_000,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A directory on the disk to measure.")
    ] = None,
    rounds: options.Count = 7,
    as_json: options.Json = False,
) -> None:
    """Reads, puts, misses and decoding of the store, beside raw preadv, torch.load and safetensors."""
    from blendrag.lab.bench.store import StoreWorkload, kv_shape, run_store

    shape = kv_shape(geometry, layers, heads, dim)
    workload = StoreWorkload(*shape, dtype, chunks, tokens, rows, rounds, directory)
    with options.status("starting") as status:
        result = run_store(workload, lambda text: status.update(text))
    if as_json:
        output.print_json(asdict(result), context)
        return
    Console().print(_store_table(result))
    for target in result.targets:
        said = {True: "met", False: "missed", None: "not measured, the page cache keeps its pages"}
        bound = f"{'≥' if target.at_least else '≤'} {target.bound:g}"
        Console().print(
            f"{target.figure}: {target.value:.3g}, expected {bound}: {said[target.met]}"
        )


def _store_table(result: StoreResult) -> Table:
    title = f"{result.chunks} × {result.layers} layers of {result.layer_bytes / 1024:.0f} KiB"
    table = Table(title=f"{title}, {result.directory}, {result.rounds} rounds")
    for column in ("part", "way", "ms", "lowest", "highest", "GB/s", "speed"):
        table.add_column(column, justify="left" if column in ("part", "way") else "right")
    for row in result.rows:
        rate = f"{row.size_bytes / row.ms / 1e6:.2f}" if row.size_bytes else "–"
        speed = "–" if row.speed is None else f"{row.speed:.2f}×"
        times = (f"{ms:.3g}" for ms in (row.ms, row.low_ms, row.high_ms))
        table.add_row(row.part, row.way, *times, rate, speed)
    return table
