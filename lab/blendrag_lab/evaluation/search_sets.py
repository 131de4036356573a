"""Questions with the chunk that answers them, of the kinds that search is measured on.

Prose, rows of a table by key, code and error numbers are in English; the handbook of six offices is in German
and in Chinese. All are generated, or files of this package; files of questions with passages can be added.
The weights of fusion were chosen on every other question of each set; the rest is held out.
"""

from __future__ import annotations

import csv
import io
import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import blendrag
from blendrag.demo import demo_corpus_path, demo_questions
from blendrag.errors import InvalidInputError
from blendrag.text.limited_reading import read_documents
from blendrag.text.readers import Document
from blendrag_lab.evaluation.datasets import read_records, text_field
from blendrag_lab.qa_records import passages_of

_HERE = Path(__file__).parent
#: Questions of each generated set.
QUESTIONS = 120
#: Directories of blendrag whose functions are asked for.
_CODE = ("text", "corpus", "store")


@dataclass(frozen=True)
class SearchQuestion:
    """A chunk of a document below ``source`` answers it if it holds one of ``texts``."""

    text: str
    source: str
    texts: tuple[str, ...]

    def is_answered_by(self, source: str, text: str) -> bool:
        folded = text.casefold()
        return source.startswith(self.source) and any(
            each.casefold() in folded for each in self.texts
        )


@dataclass(frozen=True)
class SearchSet:
    name: str
    documents: tuple[Document, ...]
    questions: tuple[SearchQuestion, ...]

    @property
    def held_out(self) -> tuple[SearchQuestion, ...]:
        """The questions on which no weight was chosen."""
        return self.questions[1::2]


def own_sets(directory: Path) -> Iterator[SearchSet]:
    """The sets that need no further file; documents are written to and read from ``directory``."""
    yield _demo()
    yield _rows(directory)
    yield _code()
    yield _errors()
    for language in ("German", "Chinese"):
        yield _handbook(language)


def file_set(path: Path) -> SearchSet:
    """Records of ``{question, answers, ctxs}``: a passage of the question that has its answer is right."""
    documents: list[Document] = []
    questions: list[SearchQuestion] = []
    for number, record in enumerate(read_records(path)):
        source, where = f"{number}/", f"record {number + 1} of {path}"
        answers = _flat(record.get("answers", record.get("answer")))
        passages = [text for _, text in passages_of(record, where)]
        documents += [
            Document(f"{source}{i}", text, f"passage {i}") for i, text in enumerate(passages)
        ]
        asked = SearchQuestion(text_field(record, "question", where), source, answers)
        if any(asked.is_answered_by(source, text) for text in passages):  # else it is yes or no
            questions.append(asked)
    if not questions:
        raise InvalidInputError(
            f"{path} has no question with an answer in one of its passages, expected at least one of "
            "{question, answers, ctxs}"
        )
    return SearchSet(path.stem, tuple(documents), tuple(questions))


def _flat(given: object) -> tuple[str, ...]:
    if isinstance(given, list):
        return tuple(text for each in given for text in _flat(each))
    return (str(given),) if str(given).strip().lower() not in ("yes", "no", "none", "") else ()


def _demo() -> SearchSet:
    documents = tuple(
        document
        for path in sorted(demo_corpus_path().iterdir())
        for document in read_documents(path)
    )
    by_name = {Path(document.source).stem: document.source for document in documents}
    questions = tuple(
        SearchQuestion(q.text, by_name[q.document_id], (q.answer,)) for q in demo_questions()
    )
    return SearchSet("demo handbook", documents, questions)


_THINGS = (
    "bolt", "nut", "washer", "bracket", "hinge", "valve", "gasket", "spring", "bearing", "pulley", "clamp",
    "hose",
)  # fmt: skip
_KINDS = ["steel", "brass", "copper", "nylon", "rubber", "zinc", "oak", "cork"]
_PLACES = ["Aldby", "Birkholm", "Castel", "Dunmore", "Eskdale", "Fennbrook"]


def _rows(directory: Path) -> SearchSet:
    """A table of 600 articles, asked for by their keys."""
    rng = random.Random(11)
    numbers = rng.sample(range(10_000, 99_999), 600)
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["sku", "name", "stock", "price", "warehouse"])
    for number in numbers:
        name = f"{rng.choice(_KINDS)} {rng.choice(_THINGS)} {rng.randint(2, 40)} mm"
        price = f"{rng.randint(10, 9000) / 100:.2f}"
        writer.writerow([f"SKU-{number}", name, rng.randint(0, 500), price, rng.choice(_PLACES)])
    path = directory / "articles.csv"
    path.write_text(out.getvalue(), encoding="utf-8")
    forms = ("How many pieces of SKU-{} are in stock?", "What does SKU-{} cost?", "SKU-{}")
    questions = tuple(
        SearchQuestion(forms[i % 3].format(number), "", (f"SKU-{number}",))
        for i, number in enumerate(rng.sample(numbers, QUESTIONS))
    )
    return SearchSet("CSV rows by key", tuple(read_documents(path)), questions)


def _code() -> SearchSet:
    """Functions of this package, asked for by name."""
    root = Path(blendrag.__file__).parent
    paths = sorted(path for name in _CODE for path in (root / name).glob("*.py"))
    documents = tuple(
        Document(str(path.relative_to(root)), path.read_text(encoding="utf-8"), path.name)
        for path in paths
    )
    names = [
        name
        for document in documents
        for name in re.findall(r"^ *def ([a-z]\w{5,})\(", document.text, re.M)
    ]
    once = sorted(name for name in set(names) if names.count(name) == 1)
    forms = ("What does the function {} do?", "Where is {} defined?", "{}")
    questions = tuple(
        SearchQuestion(forms[i % 3].format(name), "", (f"def {name}(",))
        for i, name in enumerate(random.Random(12).sample(once, QUESTIONS))
    )
    return SearchSet("functions of code", documents, questions)


_PARTS = (
    "pump", "fan", "sensor", "door", "belt", "heater", "camera", "battery", "motor", "scale", "printer",
    "gripper",
)  # fmt: skip
_FAULTS = (
    "is too hot", "does not answer", "is blocked", "reports no position", "draws too much current",
    "was opened during a run", "is not calibrated", "lost its supply",
)  # fmt: skip


def _errors() -> SearchSet:
    """A manual of 160 error numbers, asked for by number."""
    rng = random.Random(13)
    codes = [f"ERR_{group}-{number}" for group in range(40, 60) for number in range(1, 9)]
    documents = []
    for code in codes:
        part, fault = rng.choice(_PARTS), rng.choice(_FAULTS)
        text = (
            f"{code}\n\nThe {part} of the packing line {fault}. Stop the line, wait {rng.randint(2, 30)} "
            f"minutes and check the {part}. If the message returns, call the workshop."
        )
        documents.append(Document(f"manual/{code}.md", text, "Manual of the packing line"))
    forms = ("What does error {} mean?", "The line stopped with {}, what now?", "{}")
    questions = tuple(
        SearchQuestion(forms[i % 3].format(code), "", (f"{code}\n",))
        for i, code in enumerate(rng.sample(codes, QUESTIONS))
    )
    return SearchSet("error numbers", tuple(documents), questions)


def _handbook(language: str) -> SearchSet:
    """Twenty topics of six offices each, asked for in other words than the handbook's."""
    written = tomllib.loads((_HERE / "handbook.toml").read_text(encoding="utf-8"))[language.lower()]
    rng = random.Random(14)
    documents: list[Document] = []
    questions: list[SearchQuestion] = []
    for topic, (text, question) in enumerate(written["topics"]):
        numbers = rng.sample(range(2, 90), len(written["offices"]))
        for office, number in zip(written["offices"], numbers, strict=True):
            source = f"{office}/{topic}.md"
            documents.append(
                Document(source, text.format(office=office, number=number), written["title"])
            )
            questions.append(SearchQuestion(question.format(office=office), source, (str(number),)))
    rng.shuffle(questions)
    return SearchSet(language, tuple(documents), tuple(questions[:QUESTIONS]))
