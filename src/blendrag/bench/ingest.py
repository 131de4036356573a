"""Ingest against plain prefill of the same tokens, and a repeated ingest against the first."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from blendrag.bench.ttft import PREFIX_IDS, interleaved
from blendrag.engine import BlendEngine
from blendrag.identity import chunk_key
from blendrag.model import ModelAdapter
from blendrag.readers import Document
from blendrag.store import open_store


@dataclass(frozen=True)
class IngestResult:
    """Rates in tokens per second, embedding aside; ratios within one run."""

    prefill_tokens_per_s: float
    """Stock forward of the same prefix and chunk, last logits only."""
    ingest_tokens_per_s: float
    """Encode, checksum, write, fsync, rename, index."""
    relative_rate: float
    corpus_chunks: int
    first_ingest_s: float
    second_ingest_s: float
    reingest_speedup: float
    model_loaded_again: bool


def run_ingest(
    adapter: ModelAdapter,
    chunks: int,
    chunk_tokens: int,
    corpus_chunks: int,
    corpus_chunk_tokens: int,
    tick: Callable[[str], None] = lambda text: None,
) -> IngestResult:
    """Both measurements in temporary stores."""
    with tempfile.TemporaryDirectory(prefix="blendrag-bench-") as root:
        prefill, put = _rates(adapter, chunks, chunk_tokens, Path(root) / "rate", tick)
        first = second = 0.0
        loaded, count = False, 0
        if corpus_chunks:
            count, first, second, loaded = _twice(
                adapter, corpus_chunks, corpus_chunk_tokens, Path(root), tick
            )
    return IngestResult(
        prefill, put, put / prefill, count, first, second, first / second if second else 0.0, loaded
    )


@torch.inference_mode()
def _rates(
    adapter: ModelAdapter, chunks: int, tokens: int, root: Path, tick: Callable[[str], None]
) -> tuple[float, float]:
    store = open_store(root, ram_bytes=0, disk_bytes=1 << 40)
    vocab = adapter.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    namespace = adapter.identity.namespace

    def fresh_ids() -> list[int]:
        return torch.randint(2, vocab, (tokens,), generator=generator).tolist()

    def prefill() -> None:
        ids = torch.tensor([[*PREFIX_IDS, *fresh_ids()]], device=adapter.device)
        adapter.model(input_ids=ids, use_cache=True, logits_to_keep=1)

    def encode_and_put() -> None:
        ids = fresh_ids()
        store.put(namespace, chunk_key(namespace, PREFIX_IDS, ids), adapter.encode(PREFIX_IDS, ids))

    try:
        ways: dict[str, Callable[[], object]] = {"prefill": prefill, "ingest": encode_and_put}
        for way in ways.values():
            way()
        timings = interleaved(ways, chunks, adapter.device, tick)
    finally:
        store.close()
    return tokens / timings["prefill"].median * 1e3, tokens / timings["ingest"].median * 1e3


def _twice(
    adapter: ModelAdapter, chunks: int, tokens: int, root: Path, tick: Callable[[str], None]
) -> tuple[int, float, float, bool]:
    """Ingest a corpus, forget everything loaded, ingest it again from the saved checkpoint."""
    checkpoint, store = root / "model", root / "store"
    tick("saving the checkpoint")
    adapter.model.save_pretrained(checkpoint)
    adapter.tokens.tokenizer.save_pretrained(checkpoint)
    documents = list(_documents(adapter, chunks, tokens))

    def ingest(engine: BlendEngine) -> tuple[int, float]:
        began = time.perf_counter()
        report = engine.ingest(
            documents, lambda t: tick(f"{t.chunks} chunks, {t.tokens_per_s:.0f} tokens/s")
        )
        return report.chunks, time.perf_counter() - began

    def open_engine() -> BlendEngine:
        return BlendEngine(str(checkpoint), store, chunk_tokens=tokens, embedder="minilm-offline")

    with open_engine() as engine:
        _ = engine.adapter  # loading is not part of the first ingest's time
        count, first = ingest(engine)
    with open_engine() as engine:
        _, second = ingest(engine)
        loaded = engine.resources.is_loaded
    return count, first, second, loaded


def _documents(adapter: ModelAdapter, chunks: int, tokens: int) -> list[Document]:
    """Documents of random words, each a little under ``tokens`` tokens."""
    words = Path(random.__file__).read_text(encoding="utf-8").split()
    rng = random.Random(0)
    documents = []
    for number in range(chunks):
        text = f"Document {number}."
        while len(adapter.tokens.encode_text(text)) < tokens * 0.9:
            text += " " + " ".join(rng.choices(words, k=max(4, tokens // 16)))
        while len(adapter.tokens.encode_text(text)) > tokens:
            text = text.rsplit(" ", 1)[0]
        documents.append(Document(f"bench/{number}", text, f"Document {number}"))
    return documents
