"""``blendrag bench ingest``: how much longer chunks take to encode with a writer than without."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from blendrag.model.writer import FittedWriter, Writer
from blendrag.text.chunking import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.options import machine_of
from blendrag_lab.bench.rounds import Tick, Timing, milliseconds, run_rounds, silent
from blendrag_lab.bench.workload import PREFIX_IDS, random_ids
from blendrag_lab.tables import ResultTable, times


@dataclass(frozen=True)
class IngestResult:
    machine: str
    chunk_tokens: int
    plain: Timing
    """Milliseconds to encode a chunk."""
    written: Timing
    """The same with the writer."""
    writer_relative_time: float
    """``written`` over ``plain``; the median of the rounds' ratios."""


def ingest_table(result: IngestResult) -> ResultTable:
    return ResultTable(
        ("ms to encode a chunk", "with the writer", "over without"),
        [(str(result.plain), str(result.written), times(result.writer_relative_time))],
        f"chunks of {result.chunk_tokens} tokens",
    )


@options.bench(ingest_table)
@torch.inference_mode()
def ingest(
    timed: TimedModel,
    writer: Annotated[Path, typer.Option(help="Directory of the writer.", show_default=False)],
    chunks: options.Count = 12,
    chunk_tokens: Annotated[
        int, options.number("Tokens of a chunk.", MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS, int)
    ] = 512,
    tick: Tick = silent,
) -> IngestResult:
    adapter = timed.adapter
    fitted, ids = FittedWriter(Writer.load(writer), adapter), random_ids(adapter)

    def plain() -> object:
        return adapter.encode(PREFIX_IDS, ids(chunk_tokens))

    def written() -> object:
        with fitted.active(len(PREFIX_IDS), chunk_tokens):
            return plain()

    found = run_rounds(
        {
            "plain": lambda: milliseconds(plain, adapter.device),
            "written": lambda: milliseconds(written, adapter.device),
        },
        chunks,
        tick,
    )
    ratios = [own / base for base, own in zip(found["plain"], found["written"], strict=True)]
    return IngestResult(
        machine_of(adapter),
        chunk_tokens,
        Timing.of(found["plain"]),
        Timing.of(found["written"]),
        statistics.median(ratios),
    )
