"""The same corpus ingested twice, in this process or from the shell: its files, and both times."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from blendrag.corpus.embedder import MINILM_OFFLINE
from blendrag.engine import BlendEngine
from blendrag.engine.ingest import IngestReport
from blendrag.errors import BlendragError
from blendrag.model import ModelAdapter

Tick = Callable[[str], None]


class Twice(NamedTuple):
    """Both times, in seconds."""

    chunks: int
    first_s: float
    second_s: float
    loaded: bool | None
    """Whether the second loaded the model; ``None`` where it cannot be seen: from the shell."""


#: Of a corpus that was not ingested.
NOTHING = Twice(0, 0.0, 0.0, None)


class _Corpus(NamedTuple):
    """What both ingests of a corpus are given."""

    documents: Path
    checkpoint: Path
    store: Path
    chunk_tokens: int
    dtype: str
    device: str


def ingest_twice(
    adapter: ModelAdapter, root: Path, chunks: int, tokens: int, from_shell: bool, tick: Tick
) -> Twice:
    """Ingest a corpus, forget everything loaded, ingest it again from the saved checkpoint."""
    corpus = _Corpus(
        root / "documents", root / "model", root / "store", tokens,
        adapter.layout.dtype, str(adapter.device),
    )  # fmt: skip
    tick("saving the checkpoint")
    adapter.model.save_pretrained(corpus.checkpoint)
    adapter.tokens.tokenizer.save_pretrained(corpus.checkpoint)
    tick("writing the corpus")
    write_corpus(adapter, corpus.documents, chunks, tokens)
    return _from_shell(corpus, tick) if from_shell else _in_process(corpus, tick)


def _in_process(corpus: _Corpus, tick: Tick) -> Twice:
    """Two engines one after the other; loading the model is not part of the first one's time."""

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


def _from_shell(corpus: _Corpus, tick: Tick) -> Twice:
    """``blendrag ingest`` twice, from the start of the process to its end."""
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
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            raise BlendragError(f"ingest in a process of its own failed: {said[-1]}")
        return IngestReport(**json.loads(done.stdout)).whole().chunks, seconds

    chunks, first_s = ingest("first ingest, in a process of its own")
    _, second_s = ingest("second ingest, in a process of its own")
    return Twice(chunks, first_s, second_s, None)


def write_corpus(adapter: ModelAdapter, folder: Path, count: int, tokens: int) -> list[Path]:
    """``count`` text files of random words, each a little under ``tokens`` tokens."""
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
