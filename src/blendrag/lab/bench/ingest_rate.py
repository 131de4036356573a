"""``blendrag bench ingest``: ingest against stock prefill, and ingest of an unchanged corpus.

The rates come from rounds of one chunk each. ``ingest`` is one call of ``BlendEngine.ingest`` with a file of
one chunk: reading, chunking, look-up, the check of the model's identity, encoding, storing and the corpus's
rows; only embedding is left out.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from blendrag.corpus.embedder import MINILM_OFFLINE, Embedder
from blendrag.engine import BlendEngine
from blendrag.engine.ingest import IngestReport
from blendrag.errors import BlendragError
from blendrag.lab.bench import options
from blendrag.lab.bench.geometry import TimedModel
from blendrag.lab.bench.options import Machine, machine_of
from blendrag.lab.bench.rounds import Tick, clock, run_rounds, silent
from blendrag.lab.bench.scratch import scratch
from blendrag.lab.bench.tiers import AMPLE_BYTES, ON_DISK, tier_store
from blendrag.lab.bench.workload import PREFIX_IDS, StoredChunks, Workload, stock_prefill
from blendrag.lab.tables import ResultTable
from blendrag.model import ModelAdapter
from blendrag.text.chunking import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS

#: Length of MiniLM's vectors.
VECTOR_DIM = 384

ChunkTokens = Annotated[
    int, typer.Option(min=MIN_CHUNK_TOKENS, max=MAX_CHUNK_TOKENS, help="Largest chunk.")
]


@dataclass(frozen=True)
class IngestWorkload:
    """Chunks to time one by one, and a corpus to ingest twice."""

    chunks: options.Count = 12
    chunk_tokens: ChunkTokens = 512
    reingest_chunks: Annotated[
        int, typer.Option(min=0, help="Chunks of the corpus that is ingested twice; 0 skips it.")
    ] = 300
    reingest_chunk_tokens: ChunkTokens = 512
    from_shell: Annotated[
        bool,
        typer.Option("--from-shell", help="Ingest twice with blendrag ingest, in two processes."),
    ] = False


@dataclass(frozen=True)
class IngestResult:
    """Rates in tokens per second without embedding; ratios within one run."""

    machine: Machine
    prefill_tokens_per_s: float
    """Stock forward over as many tokens, last logits only."""
    encode_tokens_per_s: float
    """Part of an ingest: encode, checksum, write, fsync, rename, index."""
    ingest_tokens_per_s: float
    """``BlendEngine.ingest`` of a file of one chunk, without embedding."""
    relative_rate: float
    """Ingest over prefill."""
    corpus_chunks: int = 0
    first_ingest_s: float = 0.0
    """With the model already loaded; from the shell the whole process."""
    second_ingest_s: float = 0.0
    """With nothing loaded; from the shell the whole process."""
    reingest_speedup: float = 0.0


def ingest_table(result: IngestResult) -> ResultTable:
    """A row for each figure."""
    rows = [
        (name, f"{value:.2f}" if isinstance(value, float) else str(value))
        for name, value in vars(result).items()
    ]
    return ResultTable(("figure", "value"), rows)


@options.bench(ingest_table)
def ingest(timed: TimedModel, workload: IngestWorkload, tick: Tick = silent) -> IngestResult:
    """Ingest rate against stock prefill, and ingest of an unchanged corpus against the first."""
    adapter = timed.adapter
    with scratch() as root:
        rates = _measure_rates(adapter, workload, root / "rate", tick)
        twice = {}
        if workload.reingest_chunks:
            twice = _ingest_twice(adapter, workload, root / "twice", tick)
    return IngestResult(
        machine=machine_of(adapter),
        prefill_tokens_per_s=rates["prefill"],
        encode_tokens_per_s=rates["encode"],
        ingest_tokens_per_s=rates["ingest"],
        relative_rate=rates["ingest"] / rates["prefill"],
        **twice,
    )


def write_corpus(adapter: ModelAdapter, folder: Path, count: int, tokens: int) -> list[Path]:
    """``count`` text files of random words, each a little shorter than ``tokens`` tokens."""
    folder.mkdir(parents=True)
    words = Path(random.__file__).read_text(encoding="utf-8").split()
    rng = random.Random(0)
    files = []
    for number in range(count):
        text = f"Document {number}."
        while len(adapter.tokens.encode_text(text)) < tokens * 0.9:
            text += " " + " ".join(rng.choices(words, k=max(4, tokens // 16)))
        while len(adapter.tokens.encode_text(text)) > tokens:
            text = text.rsplit(" ", 1)[0]
        files.append(folder / f"{number:05}.txt")
        files[-1].write_text(text, encoding="utf-8")
    return files


# -- rates ----------------------------------------------------------------------------------------


class ZeroEmbedder(Embedder):
    """Returns zeros, so that an ingest is timed without embedding."""

    def embed(self, texts: Sequence[str], titles: Sequence[str] | None = None) -> np.ndarray:
        return np.zeros((len(texts), VECTOR_DIM), np.float32)  # [n, dim]


@torch.inference_mode()
def _measure_rates(
    adapter: ModelAdapter, workload: IngestWorkload, root: Path, tick: Tick
) -> dict[str, float]:
    """Tokens per second of each way."""
    tokens = workload.chunk_tokens
    vocab = adapter.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    files = iter(write_corpus(adapter, root / "documents", workload.chunks + 1, tokens))

    def fresh_ids() -> list[int]:
        return torch.randint(2, vocab, (tokens,), generator=generator).tolist()

    def prefill() -> int:
        ids = torch.tensor([[*PREFIX_IDS, *fresh_ids()]], device=adapter.device)  # [1, N]
        stock_prefill(adapter, ids)
        return tokens

    def encode() -> int:
        stored.put([fresh_ids()])
        return tokens

    def ingest() -> int:  # the first one also runs the gate, once per model and store
        return engine.ingest([next(files)]).whole().tokens

    def timed(way: Callable[[], int]) -> tuple[int, float]:
        """Tokens and milliseconds."""
        began = clock(adapter.device)
        return way(), 1e3 * (clock(adapter.device) - began)

    with (
        tier_store(ON_DISK) as there,
        BlendEngine(
            adapter, root / "engine", chunk_tokens=tokens, disk_bytes=AMPLE_BYTES
        ) as engine,
    ):
        stored = StoredChunks(adapter, Workload(), there.store)
        engine.resources.embedder = ZeroEmbedder("none")
        ways = {way.__name__: partial(timed, way) for way in (prefill, encode, ingest)}
        samples = run_rounds(ways, workload.chunks, tick)
    return {
        name: 1e3 * statistics.fmean(n for n, _ in each) / statistics.median(ms for _, ms in each)
        for name, each in samples.items()
    }


# -- the same corpus twice ------------------------------------------------------------------------


class CorpusPaths(NamedTuple):
    """What both ingests of a corpus use."""

    documents: Path
    checkpoint: Path
    store: Path
    chunk_tokens: int
    dtype: str
    device: str


def _ingest_twice(
    adapter: ModelAdapter, workload: IngestWorkload, root: Path, tick: Tick
) -> dict[str, Any]:
    """Ingest a corpus with the saved checkpoint, drop everything loaded, and ingest it again."""
    tokens = workload.reingest_chunk_tokens
    corpus = CorpusPaths(
        root / "documents", root / "model", root / "store", tokens,
        adapter.layout.dtype, str(adapter.device),
    )  # fmt: skip
    tick("saving the checkpoint")
    adapter.model.save_pretrained(corpus.checkpoint)
    adapter.tokens.tokenizer.save_pretrained(corpus.checkpoint)
    tick("writing the corpus")
    write_corpus(adapter, corpus.documents, workload.reingest_chunks, tokens)
    once = _in_shell if workload.from_shell else _in_engine
    tick("first ingest")
    chunks, first_s = once(corpus, True)
    tick("second ingest")
    _, second_s = once(corpus, False)
    return {
        "corpus_chunks": chunks,
        "first_ingest_s": first_s,
        "second_ingest_s": second_s,
        "reingest_speedup": first_s / second_s,
    }


def _in_engine(corpus: CorpusPaths, is_first: bool) -> tuple[int, float]:
    """Chunks and seconds. The first time does not include loading the model."""
    with BlendEngine(
        str(corpus.checkpoint), corpus.store, chunk_tokens=corpus.chunk_tokens,
        embedder=MINILM_OFFLINE, dtype=corpus.dtype, device=corpus.device,
    ) as engine:  # fmt: skip
        if is_first:
            _ = engine.adapter
        began = time.perf_counter()
        report = engine.ingest([corpus.documents])
        return report.whole().chunks, time.perf_counter() - began


def _in_shell(corpus: CorpusPaths, is_first: bool) -> tuple[int, float]:
    """Chunks and seconds of ``blendrag ingest``, from the start of its process to its end."""
    command = [
        sys.executable, "-m", "blendrag.cli.main", "ingest", str(corpus.documents),
        "--model", str(corpus.checkpoint), "--store", str(corpus.store),
        "--chunk-tokens", str(corpus.chunk_tokens), "--embedder", MINILM_OFFLINE,
        "--dtype", corpus.dtype, "--device", corpus.device, "--json",
    ]  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if not done.stdout:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise BlendragError(f"blendrag ingest failed: {lines[-1]}")
    return IngestReport(**json.loads(done.stdout)).whole().chunks, seconds
