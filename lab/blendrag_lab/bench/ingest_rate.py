"""``blendrag bench ingest``: tokens per second of an ingest, against stock prefill.

Each round takes one chunk. ``ingest`` is one call of ``BlendEngine.ingest`` with a file of that length,
without embedding: it encodes, checksums, writes and syncs. With ``--writer``, rounds also encode with that
writer and, alone, without.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from blendrag.engine import BlendEngine
from blendrag.model import ModelAdapter
from blendrag.model.writer import FittedWriter, Writer
from blendrag.text.chunking import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.options import machine_of
from blendrag_lab.bench.rounds import Tick, clock, run_rounds, silent
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.workload import PREFIX_IDS, random_ids, stock_prefill
from blendrag_lab.evaluation.arena import NoEmbedder
from blendrag_lab.tables import ResultTable


@dataclass(frozen=True)
class IngestResult:
    """Tokens per second; ratios within one run."""

    machine: str
    prefill_tokens_per_s: float
    """Stock forward over as many tokens, last logits only."""
    ingest_tokens_per_s: float
    relative_rate: float
    """Of the ingest, prefill being 1."""
    writer_relative_time: float | None = None
    """Encoding with ``writer`` over encoding without; the median of the rounds' ratios."""


def ingest_table(result: IngestResult) -> ResultTable:
    rows = [
        (name, f"{value:.2f}" if isinstance(value, float) else value)
        for name, value in vars(result).items()
        if value is not None
    ]
    return ResultTable(("figure", "value"), rows)


@options.bench(ingest_table)
def ingest(
    timed: TimedModel,
    chunks: options.Count = 12,
    chunk_tokens: Annotated[
        int, options.number("Tokens of a chunk.", MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS, int)
    ] = 512,
    writer: Annotated[
        Path | None, typer.Option(help="Also encode with this writer.", show_default=False)
    ] = None,
    tick: Tick = silent,
) -> IngestResult:
    adapter = timed.adapter
    fitted = FittedWriter(Writer.load(writer), adapter) if writer else None
    with scratch() as root:
        samples = _samples(adapter, fitted, chunks, chunk_tokens, root, tick)
    prefill, whole = (
        statistics.fmean(n for n, _ in samples[name])
        / statistics.median(s for _, s in samples[name])
        for name in ("prefill", "ingest")
    )
    slower = None
    if fitted is not None:
        pairs = zip(samples["alone"], samples["written"], strict=True)
        slower = statistics.median(written / alone for (_, alone), (_, written) in pairs)
    return IngestResult(machine_of(adapter), prefill, whole, whole / prefill, slower)


@torch.inference_mode()
def _samples(
    adapter: ModelAdapter,
    writer: FittedWriter | None,
    rounds: int,
    tokens: int,
    root: Path,
    tick: Tick,
) -> dict[str, list[tuple[int, float]]]:
    """Tokens and seconds of each way in each round."""
    ids, device, files = random_ids(adapter), adapter.device, _files(adapter, root, tokens)

    def prefill() -> int:
        stock_prefill(adapter, torch.tensor([[*PREFIX_IDS, *ids(tokens)]], device=device))  # [1, N]
        return tokens

    def alone() -> int:
        return adapter.encode(PREFIX_IDS, ids(tokens)).tokens

    def written() -> int:
        assert writer is not None
        with writer.active(len(PREFIX_IDS), tokens):
            return alone()

    def ingest(file: Path) -> int:  # the first one also runs the gate, once per model and store
        return engine.ingest([file]).whole().tokens

    def timed(way: Callable[..., int], *given: Path) -> tuple[int, float]:
        """Tokens and seconds."""
        began = clock(device)
        return way(*given), clock(device) - began

    ways: dict[str, Callable[[], tuple[int, float]]] = {
        "prefill": partial(timed, prefill),
        "ingest": lambda: timed(ingest, next(files)),
    }
    if writer is not None:
        ways |= {"alone": partial(timed, alone), "written": partial(timed, written)}
    with BlendEngine(
        adapter, root / "store", chunk_tokens=tokens, decode_weights="native"
    ) as engine:
        engine.use_embedder(NoEmbedder("none"))
        return run_rounds(ways, rounds, tick)


def _files(adapter: ModelAdapter, folder: Path, tokens: int) -> Iterator[Path]:
    """Files of random words, each a little shorter than ``tokens`` tokens, written when they are taken."""
    words, rng = Path(random.__file__).read_text(encoding="utf-8").split(), random.Random(0)
    for number in itertools.count():
        text = " ".join([f"Document {number}.", *rng.choices(words, k=tokens)])
        while len(adapter.tokens.encode_text(text)) > tokens:
            text = text[: len(text) * 19 // 20]
        file = folder / f"{number}.txt"
        file.write_text(text, encoding="utf-8")
        yield file
