"""What is asked: questions with their accepted answers and chunks, generated or from a file.

Files are JSON lists or JSON lines. A record has passages (``ctxs``: MuSiQue, 2WikiMQA and HotpotQA as
retrievers return them), one long text (``context``: LongBench), or no text, and then its chunks are retrieved
from a store. Texts are cut into chunks of the model's tokens, and the nearest to the question by L2 distance
are taken (CacheBlend §7.1), nearest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from blendrag.config import DEFAULT_EMBEDDER, settings
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.database import DIRECTORY
from blendrag.corpus.embedder import GIVEN, Embedder, check_embedder, embedder_of, refuse_given
from blendrag.corpus.manifest import Manifest
from blendrag.corpus.retriever import Retriever
from blendrag.errors import InvalidInputError
from blendrag.model.tokens import Tokens
from blendrag.store.identity import digest_fields
from blendrag.text.chunking import Chunker
from blendrag.text.json_records import Record, records_in
from blendrag.text.matches import MIN_LETTERS, is_recognisable
from blendrag_lab.qa_records import passage_texts, read_text
from blendrag_lab.synthetic.generator import Split
from blendrag_lab.synthetic.questions import contexts

#: The measure that is a question's score: whole answers, words found, or the longest common subsequence.
Metric = Literal["accuracy", "f1", "rouge_l"]
#: A question and its answer.
Turn = tuple[str, str]
#: Question → chunks in the order of the prompt.
Retrieve = Callable[[str], Sequence[str]]

T = TypeVar("T")

SYNTHETIC = "synthetic"
#: Default size of a chunk, in tokens: of generated contexts, and of files.
GENERATED_TOKENS, FILE_TOKENS = 64, 512
#: More questions than a generated context has of any kind.
ALL_QUESTIONS = 1000
FORMS = "{question, answers, ctxs} or {context, input, answers}"
#: LongBench's tasks whose answers are summaries.
SUMMARIES = ("multi_news", "multinews", "samsum", "gov_report", "qmsum", "vcsum")
#: The query for chunks if nothing is asked.
NO_QUESTION = "Summarise the news."


@dataclass(frozen=True)
class Case:
    """One question. Cases of one context have the same chunks and follow one another."""

    case_id: str
    context_id: str
    kind: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[str, ...]
    history: tuple[Turn, ...] = ()
    """Earlier questions of a chat with their answers. The chunks are spread evenly over all its turns."""

    @property
    def digest(self) -> str:
        """A digest of all that decides an answer and its score."""
        said = [text for turn in self.history for text in turn]
        fields = (self.kind, self.question, *self.answers, "", *self.chunks, "", *said)
        return digest_fields(field.encode("utf-8", "surrogatepass") for field in fields)


@dataclass(frozen=True)
class Dataset:
    """Cases, grouped by context, and the metric that scores them."""

    name: str
    metric: Metric
    cases: tuple[Case, ...]
    n_chunks: int
    """Most chunks of a prompt."""
    chunk_tokens: int
    """Most tokens of a chunk."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({case.kind for case in self.cases}))


def spread(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Neighbours together, in ``parts`` that are equally long or one longer."""
    edges = [len(items) * i // parts for i in range(parts + 1)]
    return [items[low:high] for low, high in pairwise(edges)]


def by_context(cases: Sequence[Case]) -> Iterator[tuple[Case, ...]]:
    """Neighbours that share their chunks."""
    for _, group in groupby(cases, key=lambda case: case.context_id):
        yield tuple(group)


def embedder_for(
    named: str | None,
    store: Path | None,
    manifest: Manifest | None,
    trust_remote_code: bool = False,
) -> Embedder:
    """The embedder of the documents of ``store``; without any, or if their vectors were given by the
    application, the one that is ``named``, that of the settings, or the default.

    Raises :class:`InvalidInputError` if the documents have another than the one that is named.
    """
    if store is not None and manifest is not None:
        check_embedder(named, manifest, store)
        if not manifest.embedder.startswith(GIVEN):
            return embedder_of(manifest, store, named or settings().embedder, trust_remote_code)
    name = named or settings().embedder or DEFAULT_EMBEDDER
    return Embedder(name, trust_remote_code=trust_remote_code)


def open_dataset(
    path: Path,
    tokens: Tokens,
    n_cases: int,
    n_chunks: int,
    chunk_tokens: int | None,
    embedder: Embedder,
    store: Path | None,
) -> Dataset:
    """Cases of a file; ``store``, whose embedder is ``embedder``, is searched for records without texts."""
    if store is None or not (store / DIRECTORY).is_dir():  # a calibration needs no documents
        chunker = Chunker(tokens.text, chunk_tokens or FILE_TOKENS)
        return read_dataset(path, chunker, embedder, n_cases, n_chunks)
    with Corpus.open(store, read_only=True) as corpus:
        retriever = Retriever(corpus, embedder)
        chunker = Chunker(tokens.text, chunk_tokens or corpus.manifest.chunk_tokens)

        def retrieve(question: str) -> list[str]:
            refuse_given(corpus.manifest.embedder)
            return [chunk.text for chunk in retriever.retrieve(question, n_chunks)]

        return read_dataset(path, chunker, embedder, n_cases, n_chunks, retrieve)


def synthetic_dataset(
    tokens: Tokens,
    seed: int = 1,
    split: Split = "test",
    n_contexts: int = 20,
    n_chunks: int = 6,
    chunk_tokens: int = GENERATED_TOKENS,
    n_questions: int | None = None,
) -> Dataset:
    """Generated documents about invented entities (:mod:`blendrag_lab.synthetic.generator`): at most
    ``n_questions`` of each context, all kinds equally often."""
    most = n_questions or ALL_QUESTIONS
    made = contexts(tokens.tokenizer, seed, split, n_contexts, n_chunks, chunk_tokens, most)
    cases: list[Case] = []
    for number, context in enumerate(made):
        name = f"{split}/{seed}/{number}"
        asked = [
            Case(f"{name}/{i}", name, q.kind, q.text, (q.answer,), context.chunks)
            for i, q in enumerate(context.questions)
        ]
        cases += _balanced(asked, n_questions or len(asked))
    return Dataset(SYNTHETIC, "accuracy", tuple(cases), n_chunks, chunk_tokens)


def _balanced(cases: Sequence[Case], n: int) -> list[Case]:
    """``n`` cases in their old order: the first of each kind, then the second of each kind, …"""
    seen = Counter[str]()
    turns = []
    for i, case in enumerate(cases):
        seen[case.kind] += 1
        turns.append((seen[case.kind], i))
    return [cases[i] for i in sorted(i for _, i in sorted(turns)[:n])]


def read_dataset(
    path: Path,
    chunker: Chunker,
    embedder: Embedder,
    n_cases: int | None = None,
    n_chunks: int = 6,
    retrieve: Retrieve | None = None,
) -> Dataset:
    """Cases of the first ``n_cases`` records; ``retrieve`` gives the chunks of records without texts."""
    records = read_records(path)[:n_cases]
    if not records:
        raise InvalidInputError(f"{path} holds no records, expected at least one of {FORMS}")
    metric = _metric_of(records[0], path)
    cases = []
    for number, record in enumerate(records, 1):
        where = f"record {number} of {path}"
        if (other := _metric_of(record, path)) != metric:  # their mean means nothing
            raise InvalidInputError(
                f"{where} is scored by {other}, record 1 by {metric}; put questions and summaries in "
                "separate files"
            )
        question = _question(record, where, metric)
        query = question or NO_QUESTION
        if retrieve is None or "ctxs" in record or {"context", "input"} <= record.keys():
            cut = [chunk.text for text in _texts(record, where) for chunk in chunker.split(text)]
            chunks = _nearest(embedder, query, _usable(cut, where), n_chunks)
        else:
            chunks = _usable(retrieve(query), where)
        name = record.get("id") or record.get("_id") or number
        kind = record.get("type") or ("summary" if metric == "rouge_l" else "question")
        context, answers = f"{path.stem}/{number}", _answers(record, where)
        case = Case(f"{context}/{name}", context, str(kind), question, answers, tuple(chunks))
        cases.append(case)
    return Dataset(path.stem, metric, tuple(cases), n_chunks, chunker.chunk_tokens)


def read_records(path: Path) -> list[Record]:
    """Raises :class:`InvalidInputError`."""
    expected = (
        f"synthetic, code, long, tables, chat, or a JSON or JSON lines file of {FORMS}; questions alone are "
        "for blendrag calibrate --questions"
    )
    return records_in(read_text(path, expected), str(path), expected)


def _metric_of(record: Record, path: Path) -> Metric:
    """Rouge-L for summaries, F1 on words otherwise."""
    task = str(record.get("dataset", "")) or path.stem
    asks_nothing = record.get("question", record.get("input")) == ""
    return "rouge_l" if asks_nothing or task.startswith(SUMMARIES) else "f1"


def text_field(record: Record, name: str, where: str) -> str:
    text = record.get(name)
    if not isinstance(text, str):
        raise InvalidInputError(
            f"{where} has no text {name}, but the fields {', '.join(map(str, record)) or 'none'}; "
            f"expected {FORMS}, or {{question, answers}} with --store of the documents they are about"
        )
    return text


def _texts(record: Record, where: str) -> list[str]:
    if "ctxs" not in record:
        return [text_field(record, "context", where)]
    return passage_texts(record, where)


def _question(record: Record, where: str, metric: Metric) -> str:
    question = text_field(record, "question" if "question" in record else "input", where).strip()
    if metric == "rouge_l":
        # SAMSum's dialogues end with the word that the prompt for a summary ends with.
        return question.removesuffix("Summary:").strip()
    if not question:
        raise InvalidInputError(f"{where} has an empty question; ask something or leave it out")
    return question


def _answers(record: Record, where: str) -> tuple[str, ...]:
    """Flat: 2WikiMQA nests each answer in a list."""
    given = record.get("answers", record.get("answer"))
    nested = given if isinstance(given, list) else [given]
    flat = [text for entry in nested for text in (entry if isinstance(entry, list) else [entry])]
    texts = (str(answer) for answer in flat if isinstance(answer, str | int | float))
    answers = tuple(text for text in texts if text.strip())
    if not answers:
        raise InvalidInputError(
            f"{where} has no answers, expected answers: [text, …] to compare with; add them or leave it out"
        )
    return answers


def _usable(chunks: Sequence[str], where: str) -> list[str]:
    """Each once, without chunks too short to be recognised in a prompt: no way could load them."""
    left = list(dict.fromkeys(text for text in chunks if is_recognisable(text)))
    if not left:
        raise InvalidInputError(
            f"{where} has an empty chunk list, expected contexts of {MIN_LETTERS} letters or more; "
            "leave it out"
        )
    return left


def _nearest(embedder: Embedder, question: str, chunks: Sequence[str], n: int) -> list[str]:
    """The ``n`` chunks nearest to the question by L2 distance, nearest first."""
    if len(chunks) == 1:
        return list(chunks)
    vectors = embedder.embed(chunks) - embedder.embed_query(question)[None]  # [chunks, dim]
    distances = np.linalg.norm(vectors, axis=1)
    return [chunks[i] for i in np.argsort(distances, kind="stable")[:n]]
