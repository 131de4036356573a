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
from typing import Annotated, NamedTuple

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
from blendrag.lab.bench.rounds import Tick, milliseconds, run_rounds, silent
from blendrag.lab.bench.scratch import scratch
from blendrag.lab.bench.tiers import AMPLE_BYTES
from blendrag.lab.bench.workload import PREFIX_IDS
from blendrag.lab.tables import NOTHING, Table
from blendrag.model import ModelAdapter
from blendrag.store import open_store
from blendrag.store.identity import chunk_key
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
    corpus_chunks: int
    first_ingest_s: float
    """With the model already loaded; from the shell the whole process."""
    second_ingest_s: float
    """With nothing loaded; from the shell the whole process."""
    reingest_speedup: float
    model_loaded_again: bool | None
    """``None`` from the shell, where it cannot be observed."""
    from_shell: bool


def ingest_table(result: IngestResult) -> Table:
    """A row for each figure."""
    rows = []
    for name, value in vars(result).items():
        text = f"{value:.2f}" if isinstance(value, float) else str(value)
        rows.append((name, NOTHING if value is None else text))
    return Table(("figure", "value"), rows)


@options.bench(ingest_table)
def ingest(timed: TimedModel, workload: IngestWorkload, tick: Tick = silent) -> IngestResult:
    """Ingest rate against stock prefill, and ingest of an unchanged corpus against the first."""
    adapter = timed.adapter
    with scratch() as root:
        rates = _measure_rates(adapter, workload, root / "rate", tick)
        twice = Twice(0, 0.0, 0.0, None)
        if workload.reingest_chunks:
            twice = _ingest_twice(adapter, workload, root / "twice", tick)
    return IngestResult(
        machine=machine_of(adapter),
        prefill_tokens_per_s=rates.prefill,
        encode_tokens_per_s=rates.encode,
        ingest_tokens_per_s=rates.ingest_file,
        relative_rate=rates.ingest_file / rates.prefill,
        corpus_chunks=twice.chunks,
        first_ingest_s=twice.first_s,
        second_ingest_s=twice.second_s,
        reingest_speedup=twice.first_s / twice.second_s if twice.second_s else 0.0,
        model_loaded_again=twice.loaded,
        from_shell=workload.from_shell,
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


class Rates(NamedTuple):
    """Tokens per second."""

    prefill: float
    encode: float
    ingest_file: float


class ZeroEmbedder(Embedder):
    """Returns zeros, so that an ingest is timed without embedding."""

    def embed(self, texts: Sequence[str], titles: Sequence[str] | None = None) -> np.ndarray:
        return np.zeros((len(texts), VECTOR_DIM), np.float32)  # [n, dim]


@torch.inference_mode()
def _measure_rates(
    adapter: ModelAdapter, workload: IngestWorkload, root: Path, tick: Tick
) -> Rates:
    tokens = workload.chunk_tokens
    vocab = adapter.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    namespace = adapter.identity.namespace
    files = iter(write_corpus(adapter, root / "documents", workload.chunks + 1, tokens))
    store = open_store(root / "store", ram_bytes=0, disk_bytes=AMPLE_BYTES)
    engine = BlendEngine(adapter, root / "engine", chunk_tokens=tokens, disk_bytes=AMPLE_BYTES)
    engine.resources.embedder = ZeroEmbedder("none")

    def fresh_ids() -> list[int]:
        return torch.randint(2, vocab, (tokens,), generator=generator).tolist()

    def prefill() -> int:
        ids = torch.tensor([[*PREFIX_IDS, *fresh_ids()]], device=adapter.device)  # [1, N]
        adapter.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        return tokens

    def encode() -> int:
        ids = fresh_ids()
        store.put(namespace, chunk_key(namespace, PREFIX_IDS, ids), adapter.encode(PREFIX_IDS, ids))
        return tokens

    def ingest_file() -> int:  # the first one also runs the gate, once per model and store
        return engine.ingest([next(files)]).whole().tokens

    def timed(way: Callable[[], int]) -> tuple[int, float]:
        """Tokens and seconds."""
        found: list[int] = []
        ms = milliseconds(lambda: found.append(way()), adapter.device)
        return found[0], ms / 1e3

    try:
        ways = {way.__name__: partial(timed, way) for way in (prefill, encode, ingest_file)}
        samples = run_rounds(ways, workload.chunks, tick)
    finally:
        engine.close()
        store.close()
    return Rates(
        **{
            name: statistics.fmean(n for n, _ in each) / statistics.median(s for _, s in each)
            for name, each in samples.items()
        }
    )


# -- the same corpus twice ------------------------------------------------------------------------


class Twice(NamedTuple):
    """Both times, in seconds."""

    chunks: int
    first_s: float
    second_s: float
    loaded: bool | None
    """Whether the second ingest loaded the model; ``None`` from the shell."""


class Corpus(NamedTuple):
    """What both ingests of a corpus use."""

    documents: Path
    checkpoint: Path
    store: Path
    chunk_tokens: int
    dtype: str
    device: str


def _ingest_twice(adapter: ModelAdapter, workload: IngestWorkload, root: Path, tick: Tick) -> Twice:
    """Ingest a corpus, drop everything loaded, and ingest it again with the saved checkpoint."""
    tokens = workload.reingest_chunk_tokens
    corpus = Corpus(
        root / "documents", root / "model", root / "store", tokens,
        adapter.layout.dtype, str(adapter.device),
    )  # fmt: skip
    tick("saving the checkpoint")
    adapter.model.save_pretrained(corpus.checkpoint)
    adapter.tokens.tokenizer.save_pretrained(corpus.checkpoint)
    tick("writing the corpus")
    write_corpus(adapter, corpus.documents, workload.reingest_chunks, tokens)
    return _from_shell(corpus, tick) if workload.from_shell else _in_process(corpus, tick)


def _in_process(corpus: Corpus, tick: Tick) -> Twice:
    """Two engines one after the other. The first time does not include loading the model."""

    def open_engine() -> BlendEngine:
        return BlendEngine(
            str(corpus.checkpoint), corpus.store, chunk_tokens=corpus.chunk_tokens,
            embedder=MINILM_OFFLINE, dtype=corpus.dtype, device=corpus.device,
        )  # fmt: skip

    def ingest(engine: BlendEngine) -> tuple[int, float]:
        began = time.perf_counter()
        report = engine.ingest(
            [corpus.documents],
            lambda t: tick(f"{t.chunks} chunks, {t.tokens_per_s:.0f} tokens/s"),
        )
        return report.whole().chunks, time.perf_counter() - began

    with open_engine() as engine:
        _ = engine.adapter
        chunks, first_s = ingest(engine)
    with open_engine() as engine:
        _, second_s = ingest(engine)
        loaded = engine.resources.is_loaded
    return Twice(chunks, first_s, second_s, loaded)


def _from_shell(corpus: Corpus, tick: Tick) -> Twice:
    """``blendrag ingest`` twice, from the start of each process to its end."""
    command = [
        sys.executable, "-m", "blendrag.cli.main", "ingest", str(corpus.documents),
        "--model", str(corpus.checkpoint), "--store", str(corpus.store),
        "--chunk-tokens", str(corpus.chunk_tokens), "--embedder", MINILM_OFFLINE,
        "--dtype", corpus.dtype, "--device", corpus.device, "--json",
    ]  # fmt: skip

    def ingest(text: str) -> tuple[int, float]:
        tick(text)
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - began
        if not done.stdout:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise BlendragError(f"blendrag ingest failed: {lines[-1]}")
        return IngestReport(**json.loads(done.stdout)).whole().chunks, seconds

    chunks, first_s = ingest("first ingest, in a process")
    _, second_s = ingest("second ingest, in a process")
    return Twice(chunks, first_s, second_s, None)
