"""``blendrag bench search``: what dense, lexical and hybrid search find, and how long a search takes.

Documents are read, cut and embedded as an ingest does it, with the tokenizer of the demo model. What is found
is that of the questions on which no weight of the search was chosen. The times are of generated chunks whose
words are as frequent as in natural text, with random vectors; those of a search do not include embedding the
question, which has its own column.
"""

from __future__ import annotations

import string
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Annotated, get_args

import numpy as np
import typer

from blendrag.cli.options import number
from blendrag.config import DEFAULT_EMBEDDER, SearchMode
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.embedder import Embedder
from blendrag.corpus.embedding_turns import Check, proceed
from blendrag.corpus.reranker import Reranker
from blendrag.corpus.retriever import Retriever
from blendrag.model.loading import load_tokens
from blendrag.option import refuse_unknown
from blendrag.text.chunking import Chunk, Chunker, chunk_id_of
from blendrag.text.readers import Document, digest_of
from blendrag_lab.bench import options
from blendrag_lab.bench.rounds import Tick, silent
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.evaluation.search_sets import SearchQuestion, SearchSet, file_set, own_sets
from blendrag_lab.tables import ResultTable, table

MODES: tuple[SearchMode, ...] = get_args(SearchMode)
#: Of hybrid search, sorted by the reranker.
RERANKED = "reranked"
#: Chunks of a prompt, and hits that are looked at for the mean reciprocal rank.
TOP_K, DEPTH = 6, 10
#: Of the chunks that are timed: words in a chunk, different words.
WORDS, VOCABULARY = 150, 200_000
#: Words of the questions that are timed, questions of each length, and those of them that are embedded.
LENGTHS, TIMED, EMBEDDED = (10, 30, 2000), 15, 5


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
    """Those that were held out."""
    found: dict[str, Found]
    """By mode, and of :data:`RERANKED`."""


@dataclass(frozen=True)
class TimeRow:
    words: int
    """Words of a question."""
    embedding: float
    """Median milliseconds for embedding it."""
    milliseconds: dict[str, float]
    """Median of the rest, by mode."""


@dataclass(frozen=True)
class SearchResult:
    embedder: str
    reranker: str | None
    rows: tuple[SearchRow, ...]
    timed_chunks: int
    times: tuple[TimeRow, ...]


def search_table(result: SearchResult) -> ResultTable:
    ways = (*MODES, *((RERANKED,) if result.reranker else ()))
    times = table(
        [
            ("words of the question", lambda row: str(row.words)),
            ("embedding it", lambda row: f"{row.embedding:.1f} ms"),
            *((mode, lambda row, mode=mode: f"{row.milliseconds[mode]:.1f} ms") for mode in MODES),
        ],
        result.times,
        f"the rest of a search over {result.timed_chunks:,} chunks, median",
    )
    by = f", then {result.reranker}" if result.reranker else ""
    return table(
        [
            ("set", lambda row: row.name),
            ("chunks", lambda row: str(row.chunks)),
            ("questions", lambda row: str(row.questions)),
            *(
                (way, lambda row, way=way: f"{row.found[way].recall:.2f} {row.found[way].mrr:.2f}")
                for way in ways
            ),
        ],
        result.rows,
        f"recall@{TOP_K} and MRR@{DEPTH} of held-out questions, {result.embedder}{by}",
        after=[times] if result.times else [],
    )


@options.bench(search_table)
def search(
    embedder: Annotated[str, typer.Option(help="sentence-transformers model.")] = DEFAULT_EMBEDDER,
    reranker: Annotated[
        str | None, typer.Option(help="Cross-encoder that sorts what hybrid search finds.")
    ] = None,
    questions: Annotated[
        list[Path] | None, typer.Option(help="Files of {question, answers, ctxs}, added to ours.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option(help="Names of the sets to measure. [default: all]")
    ] = None,
    chunks: Annotated[
        int, number("Chunks of the timed corpus; 0: no times.", 0, kind=int)
    ] = 20_000,
    tick: Tick = silent,
) -> SearchResult:
    searched, chunker = Embedder(embedder), Chunker(load_tokens("demo").text, 512)
    sorted_by = None if reranker is None else Reranker(reranker)
    rows: list[SearchRow] = []
    with scratch() as root:
        asked = [*own_sets(root), *(file_set(path) for path in questions or ())]
        refuse_unknown(sets or (), [each.name for each in asked], "a set of questions")
        chosen = [each for each in asked if not sets or each.name in sets]
        for number_of, each in enumerate(chosen):
            tick(each.name)
            with _corpus_of(each, root / str(number_of), searched, chunker) as corpus:
                rows.append(_measured(each, Retriever(corpus, searched), sorted_by))
        times = _times(root / "timed", chunks, searched, tick) if chunks else ()
    return SearchResult(embedder, reranker, tuple(rows), chunks, tuple(times))


def _corpus_of(asked: SearchSet, root: Path, embedder: Embedder, chunker: Chunker) -> Corpus:
    corpus = Corpus.open(root, create=True)
    for document in asked.documents:
        cut = chunker.split(document.text, document.source)
        texts = [chunk.text for chunk in cut]
        vectors = embedder.embed(texts, [document.title] * len(cut))
        corpus.put_document(document, digest_of(document), cut, vectors)
    return corpus


def _measured(asked: SearchSet, retriever: Retriever, reranker: Reranker | None) -> SearchRow:
    questions = asked.held_out
    found: dict[str, Found] = {mode: _found(questions, retriever, mode) for mode in MODES}
    if reranker is not None:
        sorting = Retriever(retriever.corpus, retriever.embedder, reranker=reranker)
        found[RERANKED] = _found(questions, sorting, "hybrid")
    return SearchRow(asked.name, len(retriever.corpus), len(questions), found)


def _found(questions: Sequence[SearchQuestion], retriever: Retriever, mode: SearchMode) -> Found:
    ranks: list[int] = []
    for question in questions:
        chunks = retriever.retrieve(question.text, DEPTH, search=mode)
        right = [c.rank for c in chunks if question.is_answered_by(c.source, c.text)]
        ranks.append(min(right, default=0))
    return Found(
        mean(0 < rank <= TOP_K for rank in ranks), mean(1 / r if r else 0.0 for r in ranks)
    )


# -- times ------------------------------------------------------------------------------------------


class _RandomEmbedder(Embedder):
    """Gives questions vectors like those of the chunks."""

    def __init__(self, name: str, unit: Callable[[int], np.ndarray]) -> None:
        super().__init__(name)
        self._unit = unit

    def embed_queries(self, texts: Sequence[str], *, check: Check = proceed) -> np.ndarray:
        return self._unit(len(texts))


def _times(root: Path, chunks: int, embedder: Embedder, tick: Tick) -> list[TimeRow]:
    rng = np.random.default_rng(0)
    shares = (1 / np.arange(1, VOCABULARY + 1) ** 1.05).cumsum()  # Zipf's law
    vocabulary = np.array([*islice(_vocabulary(), VOCABULARY)])
    dim = embedder.dim

    def words(count: int) -> str:
        return " ".join(vocabulary[shares.searchsorted(rng.random(count) * shares[-1])])

    def unit(count: int) -> np.ndarray:
        vectors = rng.standard_normal((count, dim), dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    with Corpus.open(root, create=True) as corpus:
        for at in range(0, chunks, 100):
            if not at % 5000:
                tick(f"{at:,} of {chunks:,} chunks")
            texts = [words(WORDS) for _ in range(min(100, chunks - at))]
            cut = [Chunk(t, 0, len(t), WORDS, chunk_id_of(t)) for t in texts]
            document = Document(f"{at}.txt", "", f"document {at}")
            corpus.put_document(document, str(at), cut, unit(len(cut)))
        retriever = Retriever(corpus, _RandomEmbedder(embedder.name, unit))
        asked = {count: [words(count) for _ in range(TIMED)] for count in LENGTHS}
        for mode in MODES:  # reads the vectors
            retriever.retrieve("where", TOP_K, search=mode)
        return [_time_row(count, texts, retriever, embedder) for count, texts in asked.items()]


def _time_row(
    words: int, texts: Sequence[str], retriever: Retriever, embedder: Embedder
) -> TimeRow:
    def search_by(mode: SearchMode) -> Callable[[str], object]:
        return lambda text: retriever.retrieve(text, TOP_K, search=mode)

    embedding = median(_ms(embedder.embed_query, text) for text in texts[:EMBEDDED])
    rest: dict[str, float] = {
        mode: median(_ms(search_by(mode), text) for text in texts) for mode in MODES
    }
    return TimeRow(words, embedding, rest)


def _ms(call: Callable[[str], object], text: str) -> float:
    """Milliseconds that it takes."""
    began = time.perf_counter()
    call(text)
    return 1e3 * (time.perf_counter() - began)


def _vocabulary() -> Iterator[str]:
    """Words of letters, short ones first, as the frequent ones of a language are."""
    syllables = [a + b for a in "bdfghklmnprstvwz" for b in "aeiou"]
    yield from string.ascii_lowercase
    made = [""]
    while True:
        made = [word + syllable for word in made for syllable in syllables]
        yield from made
