"""``blendrag bench search``: what dense, lexical and hybrid search find, and how long a search takes.

Documents are read, cut and embedded as an ingest does it, with the tokenizer of the demo model. The times are
of generated chunks whose words are as frequent as in natural text, with random vectors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Annotated, get_args

import numpy as np
import typer

from blendrag.cli.options import number
from blendrag.config import DEFAULT_EMBEDDER, SearchMode
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.embedder import Embedder
from blendrag.corpus.retriever import Retriever
from blendrag.corpus.search import SearchQuery
from blendrag.model.loading import load_tokens
from blendrag.text.chunking import Chunk, Chunker, chunk_id_of
from blendrag.text.readers import Document, digest_of
from blendrag_lab.bench import options
from blendrag_lab.bench.rounds import Tick, silent
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.evaluation.search_sets import SearchSet, file_set, own_sets
from blendrag_lab.tables import ResultTable, table

MODES: tuple[SearchMode, ...] = get_args(SearchMode)
#: Chunks of a prompt, and hits that are looked at for the mean reciprocal rank.
TOP_K, DEPTH = 6, 10
#: Of the chunks that are timed: numbers in a vector, words in a chunk, different words.
DIM, WORDS, VOCABULARY = 384, 150, 200_000
#: Words of the questions that are timed, and questions of each length.
LENGTHS, TIMED = (10, 30, 2000), 15


@dataclass(frozen=True)
class Found:
    recall: float
    """Share of questions with a right chunk among the first :data:`TOP_K`."""
    mrr: float


@dataclass(frozen=True)
class SearchRow:
    name: str
    chunks: int
    questions: int
    found: dict[str, Found]
    """By mode."""


@dataclass(frozen=True)
class TimeRow:
    words: int
    """Words of a question."""
    milliseconds: dict[str, float]
    """Median by mode, without embedding the question."""


@dataclass(frozen=True)
class SearchResult:
    embedder: str
    rows: tuple[SearchRow, ...]
    timed_chunks: int
    times: tuple[TimeRow, ...]


def search_table(result: SearchResult) -> ResultTable:
    modes = [
        (mode, lambda row, mode=mode: f"{row.found[mode].recall:.2f} {row.found[mode].mrr:.2f}")
        for mode in MODES
    ]
    times = table(
        [
            ("words of the question", lambda row: str(row.words)),
            *((mode, lambda row, mode=mode: f"{row.milliseconds[mode]:.1f} ms") for mode in MODES),
        ],
        result.times,
        f"a search over {result.timed_chunks:,} chunks, median",
    )
    return table(
        [
            ("set", lambda row: row.name),
            ("chunks", lambda row: str(row.chunks)),
            ("questions", lambda row: str(row.questions)),
            *modes,
        ],
        result.rows,
        f"recall@{TOP_K} and MRR@{DEPTH}, {result.embedder}",
        after=[times] if result.times else [],
    )


@options.bench(search_table)
def search(
    embedder: Annotated[str, typer.Option(help="sentence-transformers model.")] = DEFAULT_EMBEDDER,
    questions: Annotated[
        list[Path] | None, typer.Option(help="Files of {question, answers, ctxs}, added to ours.")
    ] = None,
    chunks: Annotated[
        int, number("Chunks of the timed corpus; 0: no times.", 0, kind=int)
    ] = 20_000,
    tick: Tick = silent,
) -> SearchResult:
    searched, chunker = Embedder(embedder), Chunker(load_tokens("demo").text, 512)
    rows: list[SearchRow] = []
    with scratch() as root:
        for number_of, each in enumerate(
            [*own_sets(root), *(file_set(path) for path in questions or ())]
        ):
            tick(each.name)
            rows.append(_measured(each, root / str(number_of), searched, chunker))
        tick(f"{chunks} chunks")
        times = _times(root / "timed", chunks) if chunks else ()
    return SearchResult(embedder, tuple(rows), chunks, tuple(times))


def _measured(asked: SearchSet, root: Path, embedder: Embedder, chunker: Chunker) -> SearchRow:
    with Corpus.open(root, create=True) as corpus:
        for document in asked.documents:
            cut = chunker.split(document.text, document.source)
            texts = [chunk.text for chunk in cut]
            vectors = embedder.embed(texts, [document.title] * len(cut))
            corpus.put_document(document, digest_of(document), cut, vectors)
        retriever = Retriever(corpus, embedder)
        found: dict[str, Found] = {mode: _found(asked, retriever, mode) for mode in MODES}
        return SearchRow(asked.name, len(corpus), len(asked.questions), found)


def _found(asked: SearchSet, retriever: Retriever, mode: SearchMode) -> Found:
    ranks: list[int] = []
    for question in asked.questions:
        chunks = retriever.retrieve(question.text, DEPTH, search=mode)
        right = [c.rank for c in chunks if question.is_answered_by(c.source, c.text)]
        ranks.append(min(right, default=0))
    return Found(
        mean(0 < rank <= TOP_K for rank in ranks), mean(1 / r if r else 0.0 for r in ranks)
    )


def _times(root: Path, chunks: int) -> list[TimeRow]:
    rng = np.random.default_rng(0)
    shares = 1 / np.arange(1, VOCABULARY + 1) ** 1.05  # Zipf's law
    shares /= shares.sum()

    def words(count: int) -> str:
        return " ".join(f"w{word}" for word in rng.choice(VOCABULARY, size=count, p=shares))

    def unit(count: int) -> np.ndarray:
        vectors = rng.standard_normal((count, DIM), dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    with Corpus.open(root, create=True) as corpus:
        for at in range(0, chunks, 100):
            texts = [words(WORDS) for _ in range(min(100, chunks - at))]
            cut = [Chunk(t, 0, len(t), WORDS, chunk_id_of(t)) for t in texts]
            document = Document(f"{at}.txt", "", f"document {at}")
            corpus.put_document(document, str(at), cut, unit(len(cut)))
        asked = {count: [words(count) for _ in range(TIMED)] for count in LENGTHS}
        vectors = unit(TIMED)
        for mode in MODES:  # reads the vectors
            corpus.search(SearchQuery("w1", vectors[0], mode), TOP_K)
        return [
            TimeRow(count, {mode: median(_ms(corpus, texts, vectors, mode)) for mode in MODES})
            for count, texts in asked.items()
        ]


def _ms(corpus: Corpus, texts: Sequence[str], vectors: np.ndarray, mode: SearchMode) -> list[float]:
    found = []
    for text, vector in zip(texts, vectors, strict=True):
        began = time.perf_counter()
        corpus.search(SearchQuery(text, vector, mode), TOP_K)
        found.append(1e3 * (time.perf_counter() - began))
    return found
