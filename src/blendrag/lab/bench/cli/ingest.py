"""``blendrag bench ingest``: rates, and a corpus that is ingested twice."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from blendrag.lab.bench.cli import options, output


def ingest(
    context: typer.Context,
    geometry: options.Geometry = None,
    model: options.Model = None,
    chunks: options.Count = 12,
    chunk_tokens: options.CorpusTokens = 512,
    reingest_chunks: Annotated[
        int, typer.Option(min=0, help="Chunks of the corpus that is ingested twice; 0 skips it.")
    ] = 300,
    reingest_chunk_tokens: options.CorpusTokens = 512,
    from_shell: Annotated[
        bool,
        typer.Option(
            "--from-shell", help="Ingest twice by blendrag ingest, each in a process of its own."
        ),
    ] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Ingest rate against plain prefill, and ingest of an unchanged corpus against the first."""
    from blendrag.lab.bench.geometry import bench_adapter
    from blendrag.lab.bench.ingest import IngestWorkload, run_ingest

    workload = IngestWorkload(
        chunks, chunk_tokens, reingest_chunks, reingest_chunk_tokens, from_shell
    )
    adapter = bench_adapter(geometry, model, dtype, device)
    with options.status("loading") as status:
        result = run_ingest(adapter, workload, lambda text: status.update(text))
    if as_json:
        output.print_json(asdict(result), context, adapter)
        return
    table = Table(title=f"{adapter.model_id}, chunks of {chunk_tokens} tokens")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in asdict(result).items():
        shown = "–" if value is None else str(value)
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else shown)
    Console().print(table)
