"""``blendrag bench ingest``: ingest against stock prefill, and ingest of an unchanged corpus.

The rates come from rounds of one chunk each. ``ingest`` is one call of ``BlendEngine.ingest`` with a file of
one chunk, without embedding. With ``--writer``, rounds also encode with that writer and, alone, without. With
``--ray-workers``, the same corpus is also ingested in one process with as
many threads and on Ray with as many workers, in turn; these rates begin after a third of the chunks, when all
workers compute.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from blendrag.corpus.embedder import MINILM_OFFLINE
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from blendrag.model import ModelAdapter
from blendrag.model.writer import FittedWriter, Writer
from blendrag.text.chunking import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS
from blendrag_lab.bench import options, require_ray
from blendrag_lab.bench.geometry import TimedModel
from blendrag_lab.bench.options import machine_of
from blendrag_lab.bench.rounds import Tick, clock, run_rounds, silent
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.tiers import AMPLE_BYTES, ON_DISK, tier_store
from blendrag_lab.bench.workload import (
    PREFIX_IDS,
    StoredChunks,
    Workload,
    random_ids,
    stock_prefill,
)
from blendrag_lab.evaluation.arena import NoEmbedder
from blendrag_lab.tables import ResultTable

#: A rate counts if no more than this part of the ingest, as a divisor, comes before it: starting workers, and
#: the first batch of each.
MOST_WAITING = 8

ChunkTokens = Annotated[
    int, options.number("Largest chunk.", MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS, int)
]


@dataclass(frozen=True)
class IngestResult:
    """Rates in tokens per second without embedding; ratios within one run."""

    machine: str
    prefill_tokens_per_s: float
    """Stock forward over as many tokens, last logits only."""
    encode_tokens_per_s: float
    """Part of an ingest: encode, checksum, write, fsync, rename, index."""
    ingest_tokens_per_s: float
    relative_rate: float
    corpus_chunks: int
    first_ingest_s: float
    """With the model already loaded."""
    second_ingest_s: float
    """With nothing loaded."""
    reingest_speedup: float
    writer_relative_time: float = 0.0
    """Encoding with ``writer`` over encoding without; median over the rounds' ratios."""
    ray_workers: int = 0
    one_process_tokens_per_s: float = 0.0
    """With as many threads as ``ray_workers``, embedding included."""
    ray_tokens_per_s: float = 0.0
    """Embedding and the writing of rows included, starting Ray and its workers not."""
    ray_relative_rate: float = 0.0
    """Median over the rounds' ratios."""


def ingest_table(result: IngestResult) -> ResultTable:
    rows = [
        (name, f"{value:.2f}" if isinstance(value, float) else str(value))
        for name, value in vars(result).items()
    ]
    return ResultTable(("figure", "value"), rows)


@options.bench(ingest_table)
def ingest(
    timed: TimedModel,
    chunks: options.Count = 12,
    chunk_tokens: ChunkTokens = 512,
    reingest_chunks: Annotated[
        int, typer.Option(min=0, help="Chunks of the corpus that is ingested twice; 0 skips it.")
    ] = 300,
    reingest_chunk_tokens: ChunkTokens = 512,
    writer: Annotated[
        Path | None, typer.Option(help="Also encode with this writer.", show_default=False)
    ] = None,
    ray_workers: Annotated[
        int, typer.Option(min=0, help="Also ingest the corpus on Ray, with this many workers.")
    ] = 0,
    rounds: options.Rounds = 3,
    tick: Tick = silent,
) -> IngestResult:
    adapter = timed.adapter
    if ray_workers and not reingest_chunks:
        raise InvalidInputError(
            f"--ray-workers {ray_workers} ingests the corpus of --reingest-chunks, which is 0; give it chunks"
        )
    fitted = FittedWriter(Writer.load(writer), adapter) if writer else None
    with scratch() as root:
        samples = _samples(adapter, fitted, chunks, chunk_tokens, root / "rate", tick)
        rates = {
            name: statistics.fmean(n for n, _ in each) / statistics.median(s for _, s in each)
            for name, each in samples.items()
        }
        corpus_chunks, first_s, second_s = 0, 0.0, 0.0
        on_ray: dict[str, float] = {}
        if reingest_chunks:
            documents, model = root / "documents", root / "model"
            tick("writing the corpus")
            write_corpus(adapter, documents, reingest_chunks, reingest_chunk_tokens)
            adapter.model.save_pretrained(model)
            adapter.tokens.tokenizer.save_pretrained(model)
            given = {
                "model": str(model),
                "store": str(root / "store"),
                "chunk_tokens": reingest_chunk_tokens,
                "decode_weights": "native",
                "embedder": MINILM_OFFLINE,
                "dtype": adapter.layout.dtype,
                "device": str(adapter.device),
            }
            tick("first ingest")
            corpus_chunks, first_s = _ingest(documents, given, True)
            tick("second ingest, with nothing loaded")
            _, second_s = _ingest(documents, given, False)
            if ray_workers:
                on_ray = _compare_with_ray(documents, given, ray_workers, rounds, root, tick)
    return IngestResult(
        machine=machine_of(adapter),
        prefill_tokens_per_s=rates["prefill"],
        encode_tokens_per_s=rates["encode"],
        ingest_tokens_per_s=rates["ingest"],
        relative_rate=rates["ingest"] / rates["prefill"],
        corpus_chunks=corpus_chunks,
        first_ingest_s=first_s,
        second_ingest_s=second_s,
        reingest_speedup=first_s / second_s if second_s else 0.0,
        writer_relative_time=statistics.median(
            written / alone
            for (_, alone), (_, written) in zip(samples["alone"], samples["written"], strict=True)
        )
        if fitted
        else 0.0,
        ray_workers=ray_workers,
        **on_ray,
    )


def write_corpus(adapter: ModelAdapter, folder: Path, count: int, tokens: int) -> list[Path]:
    """``count`` text files of random words, each a little shorter than ``tokens`` tokens."""
    folder.mkdir(parents=True)
    words = Path(random.__file__).read_text(encoding="utf-8").split()
    rng = random.Random(0)
    files = [folder / f"{number:05}.txt" for number in range(count)]
    for number, file in enumerate(files):
        text = " ".join([f"Document {number}.", *rng.choices(words, k=tokens)])
        while len(adapter.tokens.encode_text(text)) > tokens:
            text = text[: len(text) * 19 // 20]
        file.write_text(text, encoding="utf-8")
    return files


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
    ids, device = random_ids(adapter), adapter.device
    files = iter(write_corpus(adapter, root / "documents", rounds + 1, tokens))

    def prefill() -> int:
        stock_prefill(adapter, torch.tensor([[*PREFIX_IDS, *ids(tokens)]], device=device))  # [1, N]
        return tokens

    def encode() -> int:
        stored.put([ids(tokens)])
        return tokens

    def alone() -> int:
        return adapter.encode(PREFIX_IDS, ids(tokens)).tokens

    def written() -> int:
        assert writer is not None
        with writer.active(len(PREFIX_IDS), tokens):
            return alone()

    def ingest() -> int:  # the first one also runs the gate, once per model and store
        return engine.ingest([next(files)]).whole().tokens

    def timed(way: Callable[[], int]) -> tuple[int, float]:
        """Tokens and seconds."""
        began = clock(device)
        return way(), clock(device) - began

    with (
        tier_store(ON_DISK) as there,
        BlendEngine(
            adapter,
            root / "engine",
            chunk_tokens=tokens,
            disk_bytes=AMPLE_BYTES,
            decode_weights="native",
        ) as engine,
    ):
        stored = StoredChunks(adapter, Workload(), there)
        engine.use_embedder(NoEmbedder("none"))
        chosen = (prefill, encode, ingest, *((alone, written) if writer else ()))
        return run_rounds({way.__name__: partial(timed, way) for way in chosen}, rounds, tick)


def _ingest(documents: Path, given: dict[str, Any], is_first: bool) -> tuple[int, float]:
    """Chunks and seconds. The first time does not include loading the model."""
    with BlendEngine(**given) as engine:
        if is_first:
            _ = engine.adapter
        began = time.perf_counter()
        report = engine.ingest([documents])
        return report.whole().chunks, time.perf_counter() - began


def _compare_with_ray(
    documents: Path, given: dict[str, Any], workers: int, rounds: int, root: Path, tick: Tick
) -> dict[str, float]:
    """Tokens per second of one process and of workers on Ray, each round into new stores."""
    require_ray()
    from blendrag_ray.ingest import ingest_on_ray
    from blendrag_ray.ray_session import ray_session

    stores = (str(root / f"store{number}") for number in range(2 * rounds))

    def rate(ingest: Callable[..., Any]) -> float:
        marks: list[tuple[float, int]] = []
        with BlendEngine(**given | {"store": next(stores)}) as engine:
            watch = lambda report: marks.append((time.perf_counter(), report.tokens))  # noqa: E731
            started = time.perf_counter()
            ingest(engine, [documents], watch).whole()
        (began, before), (ended, after) = marks[len(marks) // 3], marks[-1]
        if ended - began < (ended - started) / MOST_WAITING:
            raise InvalidInputError(
                f"the ingest of {marks[-1][1]} tokens ends before its rate can be timed, as workers report "
                "chunks in batches; give more --reingest-chunks"
            )
        return (after - before) / (ended - began)

    def one_process() -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(workers)
        try:
            return rate(BlendEngine.ingest)
        finally:
            torch.set_num_threads(threads)

    ways: dict[str, Callable[[], float]] = {
        "one": one_process,
        "ray": partial(rate, partial(ingest_on_ray, workers=workers)),
    }
    with ray_session(workers):
        rates = run_rounds(ways, rounds, tick, warm_up=False)
    ratios = [ray / one for one, ray in zip(rates["one"], rates["ray"], strict=True)]
    return {
        "one_process_tokens_per_s": statistics.median(rates["one"]),
        "ray_tokens_per_s": statistics.median(rates["ray"]),
        "ray_relative_rate": statistics.median(ratios),
    }
