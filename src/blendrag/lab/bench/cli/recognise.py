"""``blendrag bench recognise``: finding known chunks in a prompt."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from blendrag.lab.bench.cli import options, output


def recognise(
    context: typer.Context,
    chunks: options.Count = 100_000,
    prompt_chars: Annotated[int, typer.Option(min=4000, help="Characters of a prompt.")] = 32_000,
    rounds: options.Count = 21,
    as_json: options.Json = False,
) -> None:
    """Finding known chunks in a prompt, over a corpus of many; loading its index, and keeping up."""
    from blendrag.lab.bench.recognise import RecogniseWorkload, run_recognise

    with options.status("starting") as status:
        workload = RecogniseWorkload(chunks, prompt_chars, rounds)
        result = run_recognise(workload, lambda text: status.update(text))
    if as_json:
        output.print_json(asdict(result), context)
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
