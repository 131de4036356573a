"""Ingest against plain prefill of the same tokens, and a repeated ingest against the first.

The rates come from interleaved rounds of one chunk each. ``ingest`` there is what a user calls, one
file of one chunk at a time: reading, chunking, look-up, the check of the model's identity, encoding,
storing and the corpus's rows; only embedding is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from blendrag.corpus.embedder import Embedder
from blendrag.engine import BlendEngine
from blendrag.lab.bench.ingest_twice import NOTHING, Tick, ingest_twice, write_corpus
from blendrag.lab.bench.rounds import interleaved
from blendrag.lab.bench.scratch import scratch
from blendrag.lab.bench.workload import PREFIX_IDS
from blendrag.model import ModelAdapter
from blendrag.store import open_store
from blendrag.store.identity import chunk_key

#: Length of MiniLM's vectors.
VECTOR_DIM = 384
#: Room for any workload; the free space of the disk still counts.
DISK_BYTES = 1 << 40


@dataclass(frozen=True)
class IngestWorkload:
    """Chunks to time one by one, and a corpus to ingest twice."""

    chunks: int = 12
    chunk_tokens: int = 512
    corpus_chunks: int = 300
    """0 leaves the second part out."""
    corpus_chunk_tokens: int = 512
    from_shell: bool = False
    """Ingest the corpus by ``blendrag ingest`` in processes of their own."""


@dataclass(frozen=True)
class IngestResult:
    """Rates in tokens per second, embedding aside; ratios within one run."""

    prefill_tokens_per_s: float
    """Stock forward of as many tokens, last logits only."""
    encode_tokens_per_s: float
    """Of an ingest only: encode, checksum, write, fsync, rename, index."""
    ingest_tokens_per_s: float
    """``BlendEngine.ingest`` of a file of one chunk, all but embedding."""
    relative_rate: float
    """Ingest over prefill."""
    corpus_chunks: int
    first_ingest_s: float
    """Model loaded already; from the shell the whole process, loading included."""
    second_ingest_s: float
    """Nothing loaded before; from the shell the whole process."""
    reingest_speedup: float
    model_loaded_again: bool | None
    """``None`` where it cannot be seen: from the shell."""
    from_shell: bool


def run_ingest(
    adapter: ModelAdapter, workload: IngestWorkload, tick: Tick = lambda text: None
) -> IngestResult:
    """Both measurements in temporary stores.

    Raises :class:`KeyboardInterrupt` and :class:`StoreFullError` for an ingest that was cut short.
    """
    with scratch() as root:
        rates = _rates(adapter, workload, root / "rate", tick)
        twice = NOTHING
        if workload.corpus_chunks:
            twice = ingest_twice(
                adapter,
                root / "twice",
                workload.corpus_chunks,
                workload.corpus_chunk_tokens,
                workload.from_shell,
                tick,
            )
    return IngestResult(
        prefill_tokens_per_s=rates.prefill,
        encode_tokens_per_s=rates.encode,
        ingest_tokens_per_s=rates.ingest,
        relative_rate=rates.ingest / rates.prefill,
        corpus_chunks=twice.chunks,
        first_ingest_s=twice.first_s,
        second_ingest_s=twice.second_s,
        reingest_speedup=twice.first_s / twice.second_s if twice.second_s else 0.0,
        model_loaded_again=twice.loaded,
        from_shell=workload.from_shell,
    )


# -- rates --------------------------------------------------------------------------------------


class _Rates(NamedTuple):
    """Tokens per second."""

    prefill: float
    encode: float
    ingest: float


class _NoEmbedder(Embedder):
    """Zeros at once, so that an ingest is timed without embedding."""

    def embed(self, texts: Sequence[str], titles: Sequence[str] | None = None) -> np.ndarray:
        return np.zeros((len(texts), VECTOR_DIM), np.float32)  # [n, dim]


@torch.inference_mode()
def _rates(adapter: ModelAdapter, workload: IngestWorkload, root: Path, tick: Tick) -> _Rates:
    tokens = workload.chunk_tokens
    vocab = adapter.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    namespace = adapter.identity.namespace
    files = iter(write_corpus(adapter, root / "documents", workload.chunks + 1, tokens))
    ingested: list[int] = []
    store = open_store(root / "store", ram_bytes=0, disk_bytes=DISK_BYTES)
    engine = BlendEngine(adapter, root / "engine", chunk_tokens=tokens, disk_bytes=DISK_BYTES)
    engine.resources.embedder = _NoEmbedder("none")

    def fresh_ids() -> list[int]:
        return torch.randint(2, vocab, (tokens,), generator=generator).tolist()

    def prefill() -> None:
        ids = torch.tensor([[*PREFIX_IDS, *fresh_ids()]], device=adapter.device)
        adapter.model(input_ids=ids, use_cache=True, logits_to_keep=1)

    def encode() -> None:
        ids = fresh_ids()
        store.put(namespace, chunk_key(namespace, PREFIX_IDS, ids), adapter.encode(PREFIX_IDS, ids))

    def ingest() -> None:
        ingested.append(engine.ingest([next(files)]).whole().tokens)

    ways: dict[str, Callable[[], object]] = {"prefill": prefill, "encode": encode, "ingest": ingest}
    try:
        tick("warming up")
        for way in ways.values():  # the first ingest also runs the gate, once per model and store
            way()
        timings = interleaved(ways, workload.chunks, adapter.device, tick)
    finally:
        engine.close()
        store.close()
    return _Rates(
        tokens / timings["prefill"].median * 1e3,
        tokens / timings["encode"].median * 1e3,
        statistics.fmean(ingested[1:]) / timings["ingest"].median * 1e3,
    )
