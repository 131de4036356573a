"""Question files → cases: ``{question, answers, ctxs}`` and ``{context, input, answers}``.

Owns the two forms and how each is recognised, record by record: MuSiQue, 2WikiMQA and HotpotQA as
retrievers hand them out (passages), and LongBench (one long text; MultiNews and SAMSum are summaries).
Passages and texts are cut into chunks of the model's tokens, the nearest to the question by L2
distance are taken (CacheBlend §7.1), nearest first. Does not know how a prompt is worded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blendrag.corpus.embedder import Embedder
from blendrag.errors import InvalidInputError
from blendrag.lab.evaluation.cases import Case, Dataset, Metric
from blendrag.lab.evaluation.records import FORMS, Record, read_records
from blendrag.text.chunking import Chunker
from blendrag.text.matches import MIN_LETTERS, is_recognisable

#: Chunks for a question, in the order of the prompt.
Retrieve = Callable[[str], Sequence[str]]

#: What LongBench calls the tasks whose answers are summaries.
SUMMARIES = ("multi_news", "multinews", "samsum", "gov_report", "qmsum", "vcsum")
#: What to look for where nothing is asked.
NO_QUESTION = "Summarise the news."


def read_dataset(
    path: Path,
    chunker: Chunker,
    embedder: Embedder,
    n_cases: int | None = None,
    n_chunks: int = 6,
    retrieve: Retrieve | None = None,
) -> Dataset:
    """Cases of the first ``n_cases`` records of a JSON list or of JSON lines.

    ``retrieve`` gives the chunks of a question whose record brings no texts of its own.

    Raises :class:`InvalidInputError` for a file that cannot be read, a form nobody knows, and records
    without question, answers or chunks, each by its number.
    """
    records = read_records(path)[:n_cases]
    if not records:
        raise InvalidInputError(f"{path} holds no records, expected at least one of {FORMS}")
    metric = _common_metric(records, path)
    cases = []
    for number, record in enumerate(records, 1):
        where = f"record {number} of {path}"
        texts = _texts(record, where) if retrieve is None or _has_texts(record) else None
        question = _question(record, where, metric)
        if texts is not None:
            chunks = [chunk.text for text in texts for chunk in chunker.split(text)]
        else:
            assert retrieve is not None
            chunks = list(retrieve(question or NO_QUESTION))
        chunks = _recognised(chunks, where)
        name = str(record.get("id") or record.get("_id") or number)
        kind = str(record.get("type") or ("summary" if metric == "rouge_l" else "question"))
        if texts is not None:
            chunks = _nearest(embedder, question or NO_QUESTION, chunks, n_chunks)
        cases.append(
            Case(
                f"{path.stem}/{number}/{name}",
                f"{path.stem}/{number}",
                kind,
                question,
                _answers(record, where),
                tuple(chunks),
            )
        )
    return Dataset(path.stem, metric, tuple(cases), n_chunks, chunker.chunk_tokens)


def _recognised(chunks: Sequence[str], where: str) -> list[str]:
    """Each once, but for those too short to be recognised in a prompt: no way could load them."""
    left = list(dict.fromkeys(text for text in chunks if is_recognisable(text)))
    if not left:
        raise InvalidInputError(
            f"{where} has an empty chunk list, expected contexts of {MIN_LETTERS} letters or more; "
            "leave it out"
        )
    return left


# -- records --------------------------------------------------------------------------------------


def _has_texts(record: Record) -> bool:
    return "ctxs" in record or ("context" in record and "input" in record)


def _texts(record: Record, where: str) -> list[str]:
    """Of either form; a file may hold both."""
    if "ctxs" in record:
        return _passages(record, where)
    if _has_texts(record):
        return [_text(record, "context", where)]
    raise InvalidInputError(
        f"{where} has the fields {', '.join(map(str, record)) or 'none'}; expected {FORMS}, or "
        "{question, answers} with --store of the documents they are about"
    )


def _common_metric(records: Sequence[Record], path: Path) -> Metric:
    """Raises :class:`InvalidInputError` where some are summaries and others are not: one mean of words
    found and subsequences means nothing."""
    metric, reason = _metric_of(records[0], path)
    for number, record in enumerate(records, 1):
        other, why = _metric_of(record, path)
        if other != metric:
            raise InvalidInputError(
                f"record {number} of {path} is scored by {other}, as {why}, record 1 by {metric}, as "
                f"{reason}; mend or leave out the odd one, or give questions and summaries in files of "
                "their own"
            )
    return metric


def _metric_of(record: Record, path: Path) -> tuple[Metric, str]:
    """Rouge-L for summaries, by the task's name or because nothing is asked; F1 on words else. And why."""
    named = str(record.get("dataset", "")) or path.stem
    if named.startswith(SUMMARIES):
        return "rouge_l", f"its task is {named}"
    asked = record.get("question", record.get("input"))
    if asked == "":
        return "rouge_l", "it asks nothing"
    return "f1", "it asks a question" if asked else "it has no question"


def _passages(record: Record, where: str) -> list[str]:
    passages = record.get("ctxs")
    if not isinstance(passages, list) or not passages:
        raise InvalidInputError(
            f"{where} has an empty chunk list, expected ctxs: [{{title, text}}, …]; leave it out"
        )
    return [_passage(passage, where) for passage in passages]


def _passage(passage: Any, where: str) -> str:
    if isinstance(passage, str):
        return passage
    if not isinstance(passage, Mapping) or not isinstance(passage.get("text"), str):
        raise InvalidInputError(f"{where} has a passage without text, expected {{title, text}}")
    title = str(passage.get("title") or "").strip()
    return f"{title}\n{passage['text']}" if title else passage["text"]


def _text(record: Record, name: str, where: str) -> str:
    text = record.get(name)
    if not isinstance(text, str):
        raise InvalidInputError(f"{where} has no text {name}, expected {FORMS}")
    return text


def _question(record: Record, where: str, metric: Metric) -> str:
    question = _text(record, "question" if "question" in record else "input", where).strip()
    if not question and metric != "rouge_l":
        raise InvalidInputError(f"{where} has an empty question; ask something or leave it out")
    # SAMSum's dialogues end with the word that every prompt for a summary ends with.
    return question.removesuffix("Summary:").strip() if metric == "rouge_l" else question


def _answers(record: Record, where: str) -> tuple[str, ...]:
    """Flat, as 2WikiMQA nests each in a list of its own."""
    given = record.get("answers", record.get("answer"))
    nested = given if isinstance(given, list) else [given]
    flat = [text for entry in nested for text in (entry if isinstance(entry, list) else [entry])]
    texts = [str(answer) for answer in flat if isinstance(answer, str | int | float)]
    answers = tuple(text for text in texts if text.strip())
    if not answers:
        raise InvalidInputError(
            f"{where} has no answers, expected answers: [text, …], which what is answered is compared "
            "with; add them or leave it out"
        )
    return answers


# -- retrieval ------------------------------------------------------------------------------------


def _nearest(embedder: Embedder, question: str, chunks: Sequence[str], n: int) -> list[str]:
    """The ``n`` chunks nearest to the question by L2 distance, nearest first."""
    if len(chunks) == 1:
        return list(chunks)
    distances = np.linalg.norm(
        embedder.embed(chunks) - embedder.embed_query(question)[None], axis=1
    )  # [chunks]
    return [chunks[i] for i in np.argsort(distances, kind="stable")[:n]]
