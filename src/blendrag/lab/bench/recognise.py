"""What finding known chunks in a prompt costs, over a large corpus: time, memory, and keeping up.

Two corpora on disk are searched in turn: one of chunks that differ from their first words on, one of
chunks whose first characters are all the same. Every way checks that what it found is what stood there.
No model is loaded and nothing is embedded.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from blendrag.corpus.corpus import Corpus
from blendrag.lab.bench.memory import peak_bytes
from blendrag.lab.bench.scratch import scratch
from blendrag.lab.bench.store_rounds import MeasuredNothingError, Row, Tick, Way, measure
from blendrag.text.chunking import Chunk, chunk_id_of
from blendrag.text.matches import Match
from blendrag.text.readers import Document

#: Characters that all chunks of the second corpus begin with.
SHARED_CHARS = 200
CHUNK_CHARS = 2000
#: Chunks written to a corpus in one transaction.
_BATCH = 1000


@dataclass(frozen=True)
class RecogniseWorkload:
    """How large the corpora and the prompts are."""

    chunks: int = 100_000
    prompt_chars: int = 32_000
    rounds: int = 21


@dataclass(frozen=True)
class Loaded:
    """One corpus's anchors, from its file into memory."""

    corpus: str
    chunks: int
    add_s: float
    """All chunks into the corpus: texts, anchors, rows."""
    load_s: float
    """The index from the file, with the first prompt searched."""
    memory_bytes: int | None
    """By which loading raised the process's memory at its highest."""
    follow_s: float
    """The first prompt after one chunk was added and one removed."""


@dataclass(frozen=True)
class RecogniseResult:
    """One run; times of a prompt in milliseconds."""

    chunks: int
    prompt_chars: int
    rounds: int
    rows: tuple[Row, ...]
    cpu_ms: tuple[float, ...]
    """Of each row, the median of the thread's own time: what is left on a machine that others use."""
    loads: tuple[Loaded, ...]


def run_recognise(workload: RecogniseWorkload, tick: Tick = lambda text: None) -> RecogniseResult:
    """Build both corpora in a directory of their own, which is removed, and search them in turn."""
    loads: list[Loaded] = []
    ways: list[_Find] = []
    with scratch() as directory:
        opened = []
        try:
            for name, shared in (("distinct", 0), (f"first {SHARED_CHARS} shared", SHARED_CHARS)):
                tick(f"{name}: adding {workload.chunks} chunks")
                root = directory / str(shared)
                with _timed() as adding:
                    texts = _fill(root, workload.chunks, shared)
                corpus = Corpus.open(root)
                opened.append(corpus)
                tick(f"{name}: loading")
                loads.append(_load(corpus, name, texts, adding()))
                ways += _ways(corpus, name, texts, workload.prompt_chars)
            rows = measure("find", ways, workload.rounds, tick)
        finally:
            for corpus in opened:
                corpus.close()
    cpu_ms = tuple(statistics.median(way.cpu_ms) for way in ways)
    return RecogniseResult(
        workload.chunks, workload.prompt_chars, workload.rounds, tuple(rows), cpu_ms, tuple(loads)
    )


class _Find(Way):
    """Searching one prompt in which so many chunks stand whole, or cut off, and no others."""

    def __init__(self, corpus: Corpus, name: str, prompt: str, whole: int, cut: int) -> None:
        self.name = name
        self.size_bytes = 0
        self._corpus, self._prompt, self._expected = corpus, prompt, (whole, cut)
        self._found: list[Match] = []
        self.cpu_ms: list[float] = []

    def run(self) -> None:
        began = time.thread_time()
        self._found = self._corpus.chunk_index.find(self._prompt)
        self.cpu_ms.append((time.thread_time() - began) * 1e3)

    def check(self) -> None:
        whole = sum(match.complete for match in self._found)
        if (whole, len(self._found) - whole) != self._expected:
            raise MeasuredNothingError(
                f"{self.name}: {whole} whole and {len(self._found) - whole} cut chunks found, expected "
                f"{self._expected}"
            )


def _ways(corpus: Corpus, name: str, texts: list[str], chars: int) -> list[_Find]:
    """Prompts of whole chunks, of chunks cut in half, and of text that is in no chunk."""
    halves = [text[: len(text) // 2] for text in texts]
    unknown = _texts(random.Random(-1), len(texts), 0)
    ways: list[_Find] = []
    for kind, parts in (
        ("whole chunks", texts),
        ("chunks cut off", halves),
        ("no chunks", unknown),
    ):
        taken, size = [], 0
        for part in _spread(parts):
            if size + len(part) + 2 > chars:
                break
            taken.append(part)
            size += len(part) + 2
        whole = len(taken) if parts is texts else 0
        cut = len(taken) if parts is halves else 0
        ways.append(_Find(corpus, f"{name}: {kind}", "\n\n".join(taken), whole, cut))
    return ways


def _spread(parts: list[str]) -> Iterator[str]:
    """Parts from all over the list, none twice."""
    step = max(1, len(parts) // 64)
    for first in range(step):
        yield from parts[first::step]


def _load(corpus: Corpus, name: str, texts: list[str], add_s: float) -> Loaded:
    prompt = texts[0]
    with _timed() as loading:
        memory = peak_bytes(lambda: corpus.chunk_index.find(prompt), torch.device("cpu"))
    load_s = loading()
    if len(corpus.chunk_index) != len(texts) or not corpus.chunk_index.find(prompt):
        raise MeasuredNothingError(
            f"{name}: {len(corpus.chunk_index)} of {len(texts)} chunks loaded"
        )
    _put(corpus, "later", _texts(random.Random(-2), 1, 0))
    corpus.remove_source("later")
    _put(corpus, "later", _texts(random.Random(-3), 1, 0))
    with _timed() as following:
        corpus.chunk_index.find(prompt)
    if len(corpus.chunk_index) != len(texts) + 1:
        raise MeasuredNothingError(f"{name}: a chunk that was added is not known")
    return Loaded(name, len(texts), add_s, load_s, memory, following())


def _fill(root: Path, count: int, shared: int) -> list[str]:
    texts = _texts(random.Random(shared), count, shared)
    with Corpus.open(root, create=True) as corpus:
        for at in range(0, count, _BATCH):
            _put(corpus, f"document {at}", texts[at : at + _BATCH])
    return texts


def _put(corpus: Corpus, source: str, texts: list[str]) -> None:
    chunks = [Chunk(text, 0, len(text), len(text) // 4, chunk_id_of(text)) for text in texts]
    nothing = np.zeros((len(texts), 0), np.float32)  # nothing is searched by vector here
    corpus.put_document(Document(source, "", source), source, chunks, nothing)


def _texts(rng: random.Random, count: int, shared: int) -> list[str]:
    """Chunks of :data:`CHUNK_CHARS` and more characters, no two alike behind the shared ones."""
    words = ["".join(rng.choices("etaoinshrdlucmf", k=rng.randint(2, 9))) for _ in range(4000)]
    lines = [" ".join(rng.choices(words, k=24)) for _ in range(4000)]
    head = "".join(f"{word} " for word in words)[: max(0, shared - 1)] + " " * (shared > 0)
    long = range(CHUNK_CHARS // 150 + 1)
    return [head + f"{i} " + ". ".join(rng.choice(lines) for _ in long) for i in range(count)]


@contextmanager
def _timed() -> Iterator[_Clock]:
    clock = _Clock()
    yield clock
    clock.stop()


class _Clock:
    """Seconds, once stopped."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._seconds = 0.0

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._began

    def __call__(self) -> float:
        return self._seconds
