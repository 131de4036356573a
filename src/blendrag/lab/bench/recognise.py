"""``blendrag bench recognise``: finding known chunks in a prompt, over a large corpus.

Two corpora on disk are searched: one whose chunks differ from their first words on, and one whose chunks
share their first characters. Each way checks what it found. No model is loaded and nothing is embedded.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from blendrag.corpus.corpus import Corpus
from blendrag.lab.bench import options
from blendrag.lab.bench.rounds import (
    CheckedWay,
    MeasuredNothingError,
    Tick,
    WayRow,
    measure_part,
    peak_bytes,
    seconds_of,
    silent,
)
from blendrag.lab.bench.scratch import scratch
from blendrag.lab.tables import NOTHING, ResultTable, table
from blendrag.text.chunking import Chunk, chunk_id_of
from blendrag.text.readers import Document

#: Characters that all chunks of the second corpus start with.
SHARED_CHARS = 200
CHUNK_CHARS = 2000
#: Chunks added to a corpus in one transaction.
BATCH = 1000


@dataclass(frozen=True)
class LoadedIndex:
    """The index of one corpus, loaded from its file."""

    corpus: str
    add_s: float
    """Adding all chunks to the corpus."""
    load_s: float
    """Loading the index, including the search of the first prompt."""
    memory_bytes: int | None
    """By how much loading raised the peak memory of the process."""
    follow_s: float
    """The first search after one chunk was added and one removed."""


@dataclass(frozen=True)
class RecogniseResult:
    """One run; times of a prompt are CPU times, which other processes hardly disturb."""

    chunks: int
    prompt_chars: int
    rounds: int
    rows: tuple[WayRow, ...]
    loads: tuple[LoadedIndex, ...]


def recognise_table(result: RecogniseResult) -> ResultTable:
    notes = []
    for each in result.loads:
        size = NOTHING if each.memory_bytes is None else f"{each.memory_bytes / 1e6:.0f} MB"
        notes.append(
            f"{each.corpus}: added in {each.add_s:.1f} s, loaded in {each.load_s:.2f} s and {size}, followed "
            f"a change in {each.follow_s * 1e3:.0f} ms"
        )
    return table(
        [
            ("corpus and prompt", lambda row: row.way),
            ("CPU ms (lowest to highest)", lambda row: str(row.ms)),
        ],
        result.rows,
        f"{result.chunks:,} chunks, prompts of {result.prompt_chars:,} characters, {result.rounds} rounds",
        notes,
    )


@options.bench(recognise_table)
def recognise(
    chunks: options.Count = 100_000,
    prompt_chars: Annotated[int, typer.Option(min=4000, help="Characters of a prompt.")] = 32_000,
    rounds: options.Rounds = 21,
    tick: Tick = silent,
) -> RecogniseResult:
    loads: list[LoadedIndex] = []
    ways: list[CheckedWay] = []
    with scratch() as directory, ExitStack() as corpora:
        for name, shared in (("distinct", 0), (f"first {SHARED_CHARS} shared", SHARED_CHARS)):
            tick(f"{name}: adding {chunks} chunks")
            root, texts = directory / str(shared), _texts(shared, chunks, shared)
            add_s = seconds_of(partial(_fill, root, texts))
            tick(f"{name}: loading")
            corpus = corpora.enter_context(Corpus.open(root))
            loads.append(_load(corpus, name, texts, add_s))
            ways += _ways(corpus, name, texts, prompt_chars)
        rows = measure_part("find", ways, rounds, tick)
    return RecogniseResult(chunks, prompt_chars, rounds, tuple(rows), tuple(loads))


def _texts(seed: int, count: int, shared: int) -> list[str]:
    """Texts of :data:`CHUNK_CHARS` or more characters, all different after the ``shared`` first ones."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlucmf", k=rng.randint(2, 9))) for _ in range(4000)]
    lines = [" ".join(rng.choices(words, k=24)) for _ in range(4000)]
    head, length = " ".join(words)[:shared], CHUNK_CHARS // 150 + 1
    return [f"{head}{i} {'. '.join(rng.choices(lines, k=length))}" for i in range(count)]


def _fill(root: Path, texts: list[str]) -> None:
    with Corpus.open(root, create=True) as corpus:
        for at in range(0, len(texts), BATCH):
            _put(corpus, f"document {at}", texts[at : at + BATCH])


def _put(corpus: Corpus, source: str, texts: list[str]) -> None:
    chunks = [Chunk(text, 0, len(text), len(text) // 4, chunk_id_of(text)) for text in texts]
    vectors = np.zeros((len(texts), 0), np.float32)  # [n, 0]: nothing is searched by vector
    corpus.put_document(Document(source, "", source), source, chunks, vectors)


def _load(corpus: Corpus, name: str, texts: list[str], add_s: float) -> LoadedIndex:
    prompt = texts[0]
    began = time.perf_counter()
    memory_bytes = peak_bytes(lambda: corpus.chunk_index.find(prompt), torch.device("cpu"))
    load_s = time.perf_counter() - began
    if len(corpus.chunk_index) != len(texts) or not corpus.chunk_index.find(prompt):
        raise MeasuredNothingError(
            f"{name}: {len(corpus.chunk_index)} of {len(texts)} chunks loaded"
        )
    _put(corpus, "later", _texts(-2, 1, 0))
    corpus.remove_source("later")
    _put(corpus, "later", _texts(-3, 1, 0))
    follow_s = seconds_of(lambda: corpus.chunk_index.find(prompt))
    if len(corpus.chunk_index) != len(texts) + 1:
        raise MeasuredNothingError(f"{name}: a chunk that was added is not known")
    return LoadedIndex(name, add_s, load_s, memory_bytes, follow_s)


def _ways(corpus: Corpus, name: str, texts: list[str], chars: int) -> list[CheckedWay]:
    """Prompts of whole chunks, of chunks cut in half, and of text that is in no chunk."""
    ways = []
    for kind, parts in (
        ("whole chunks", texts),
        ("chunks cut off", [text[: len(text) // 2] for text in texts]),
        ("no chunks", _texts(-1, len(texts), 0)),
    ):
        step = max(1, len(parts) // 64)  # from all over the corpus, no part twice
        order = [part for first in range(step) for part in parts[first::step]]
        count = sum(end <= chars for end in accumulate(len(part) + 2 for part in order))
        expected = (count * (kind == "whole chunks"), count * (kind == "chunks cut off"))
        way = f"{name}: {kind}"
        ways.append(
            CheckedWay(way, partial(_find, corpus, way, "\n\n".join(order[:count]), expected))
        )
    return ways


def _find(corpus: Corpus, name: str, prompt: str, expected: tuple[int, int]) -> float:
    """CPU seconds to search one prompt, which has ``expected`` whole and cut chunks."""
    began = time.thread_time()
    found = corpus.chunk_index.find(prompt)
    seconds = time.thread_time() - began
    whole = sum(match.complete for match in found)
    if (whole, len(found) - whole) != expected:
        raise MeasuredNothingError(
            f"{name}: {whole} whole and {len(found) - whole} cut chunks found, expected {expected[0]} and "
            f"{expected[1]}"
        )
    return seconds
