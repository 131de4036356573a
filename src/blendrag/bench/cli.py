"""``blendrag bench``: parse, measure, print a table or JSON. Imports torch only inside commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from blendrag.chunking import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS
from blendrag.config import DEFAULT_POLICY, UNCALIBRATED_SCHEDULE

if TYPE_CHECKING:
    from blendrag.bench.store import StoreResult

app = typer.Typer(no_args_is_help=True, help="Measure speed: interleaved modes, medians, ratios.")

Geometry = Annotated[
    str | None, typer.Option(help="Random weights of a known shape, e.g. qwen2.5-0.5b.")
]
Model = Annotated[str | None, typer.Option(help="Hub id, directory, or demo.")]
Count = Annotated[int, typer.Option(min=1)]
Size = Annotated[int | None, typer.Option(min=1, help="Of a KV; not beside --geometry.")]
CorpusTokens = Annotated[
    int,
    typer.Option(min=MIN_CHUNK_TOKENS, max=MAX_CHUNK_TOKENS, help="Largest chunk of an ingest."),
]
Policy = Annotated[str, typer.Option(help="query, hkvd, boundary(k), reuse or full.")]
Schedule = Annotated[str, typer.Option(help="constant, linear, geometric[:g] or one per layer.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback()
def bench() -> None:
    """Measure speed: interleaved modes, medians, ratios."""


@app.command()
def ttft(
    geometry: Geometry = None,
    model: Model = None,
    chunks: Count = 6,
    chunk_tokens: Count = 512,
    question_tokens: Count = 32,
    ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Recompute ratio r in [0, 1].")
    ] = 0.15,
    policy: Policy = DEFAULT_POLICY,
    schedule: Schedule = UNCALIBRATED_SCHEDULE,
    rounds: Count = 5,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time to first token of full, prefix, reuse and blend, side by side."""
    from blendrag.bench.geometry import bench_adapter
    from blendrag.bench.ttft import Workload, run_ttft

    workload = Workload(chunks, chunk_tokens, question_tokens, ratio, policy, schedule, rounds)
    adapter = bench_adapter(geometry, model, dtype, device)
    with _status("loading") as status:
        result = run_ttft(adapter, workload, lambda text: status.update(text))
    if as_json:
        _print_json(asdict(result))
        return
    rows = [
        ("full (stock prefill)", result.full_ms, "full"),
        ("prefix, over a stock cache", result.prefix_stock_ms, "prefix_stock"),
        ("prefix, through the fusor", result.prefix_fused_ms, "prefix_fused"),
        (f"blend r = {result.ratio:.2f}", result.blend_ms, "blend"),
        ("reuse", result.reuse_ms, "reuse"),
    ]
    table = Table(
        title=f"{result.model}, {result.dtype}, {result.prompt_tokens} tokens, {result.device}"
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


@app.command()
def sweep(
    geometry: Geometry = None,
    model: Model = None,
    ratios: Annotated[str, typer.Option(help="Comma-separated.")] = "0.05,0.1,0.15,0.2,0.3,0.5,1.0",
    chunks: Count = 6,
    chunk_tokens: Count = 512,
    question_tokens: Count = 32,
    policy: Policy = DEFAULT_POLICY,
    schedule: Schedule = UNCALIBRATED_SCHEDULE,
    rounds: Count = 3,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time to first token over the recompute ratio, in one run."""
    from blendrag.bench.geometry import bench_adapter
    from blendrag.bench.sweep import parse_ratios, run_sweep
    from blendrag.bench.ttft import Workload

    wanted = parse_ratios(ratios)
    workload = Workload(chunks, chunk_tokens, question_tokens, 0.0, policy, schedule, rounds)
    adapter = bench_adapter(geometry, model, dtype, device)
    with _status("loading") as status:
        rows = run_sweep(adapter, workload, wanted, lambda text: status.update(text))
    if as_json:
        _print_json({"rows": [asdict(row) for row in rows]})
        return
    table = Table(title=f"{adapter.model_id}, {chunks} × {chunk_tokens} + {question_tokens} tokens")
    for column in ("ratio", "charged", "TTFT ms", "speedup", "floor", "of floor"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.ratio:.2f}", f"{row.charged_ratio:.3f}", f"{row.ms:.0f}",
            f"{row.speedup:.2f}×", f"{row.floor_speedup:.2f}×",
            f"{row.speedup / row.floor_speedup:.2f}",
        )  # fmt: skip
    Console().print(table)


@app.command()
def ingest(
    geometry: Geometry = None,
    model: Model = None,
    chunks: Count = 12,
    chunk_tokens: CorpusTokens = 512,
    reingest_chunks: Annotated[
        int, typer.Option(min=0, help="Chunks of the corpus that is ingested twice; 0 skips it.")
    ] = 300,
    reingest_chunk_tokens: CorpusTokens = 512,
    from_shell: Annotated[
        bool,
        typer.Option(
            "--from-shell", help="Ingest twice by blendrag ingest, each in a process of its own."
        ),
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Ingest rate against plain prefill, and ingest of an unchanged corpus against the first."""
    from blendrag.bench.geometry import bench_adapter
    from blendrag.bench.ingest import IngestWorkload, run_ingest

    workload = IngestWorkload(
        chunks, chunk_tokens, reingest_chunks, reingest_chunk_tokens, from_shell
    )
    adapter = bench_adapter(geometry, model, dtype, device)
    with _status("loading") as status:
        result = run_ingest(adapter, workload, lambda text: status.update(text))
    if as_json:
        _print_json(asdict(result))
        return
    table = Table(title=f"{adapter.model_id}, chunks of {chunk_tokens} tokens")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in asdict(result).items():
        shown = "–" if value is None else str(value)
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else shown)
    Console().print(table)


@app.command()
def store(
    geometry: Geometry = None,
    layers: Size = None,
    heads: Size = None,
    dim: Size = None,
    tokens: Count = 512,
    chunks: Count = 6,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    rows: Annotated[
        int, typer.Option(min=1, help="Rows of the index in which a key is missing.")
    ] = 1_000_000,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A directory on the disk to measure.")
    ] = None,
    rounds: Count = 7,
    as_json: Json = False,
) -> None:
    """Reads, puts, misses and decoding of the store, beside raw preadv, torch.load and safetensors."""
    from blendrag.bench.store import StoreWorkload, kv_shape, run_store

    shape = kv_shape(geometry, layers, heads, dim)
    workload = StoreWorkload(*shape, dtype, chunks, tokens, rows, rounds, directory)
    with _status("starting") as status:
        result = run_store(workload, lambda text: status.update(text))
    if as_json:
        _print_json(asdict(result))
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


@app.command()
def recognise(
    chunks: Count = 100_000,
    prompt_chars: Annotated[int, typer.Option(min=4000, help="Characters of a prompt.")] = 32_000,
    rounds: Count = 21,
    as_json: Json = False,
) -> None:
    """Finding known chunks in a prompt, over a corpus of many; loading its index, and keeping up."""
    from blendrag.bench.recognise import RecogniseWorkload, run_recognise

    with _status("starting") as status:
        workload = RecogniseWorkload(chunks, prompt_chars, rounds)
        result = run_recognise(workload, lambda text: status.update(text))
    if as_json:
        _print_json(asdict(result))
        return
    table = Table(title=f"{chunks} chunks, prompts of {prompt_chars} characters, {rounds} rounds")
    for column in ("corpus and prompt", "ms", "lowest", "highest", "CPU ms"):
        table.add_column(column, justify="left" if column == "corpus and prompt" else "right")
    for row, cpu_ms in zip(result.rows, result.cpu_ms, strict=True):
        times = (row.ms, row.low_ms, row.high_ms, cpu_ms)
        table.add_row(row.way, *(f"{ms:.2f}" for ms in times))
    Console().print(table)
    for load in result.loads:
        memory = "–" if load.memory_bytes is None else f"{load.memory_bytes / 1e6:.0f} MB"
        Console().print(
            f"{load.corpus}: added in {load.add_s:.1f} s, loaded in {load.load_s:.2f} s and {memory}, "
            f"followed a change in {load.follow_s * 1e3:.0f} ms"
        )


def _status(text: str) -> Any:
    return Console(stderr=True).status(text)


def _print_json(fields: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(fields, indent=2))
