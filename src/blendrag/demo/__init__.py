"""What the demo needs: the embedded model ``demo`` and its corpus, the handbook and the writer for SmolLM2,
and questions.

Importing this loads neither torch nor transformers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Paragraph = tuple[str, int]
"""(doc_id, index) of a paragraph."""


@dataclass(frozen=True)
class Question:
    """A question with its one short answer."""

    text: str
    answer: str
    kind: str
    """``direct`` (a paragraph with the name states it), ``coreference`` (a later paragraph does), ``two-hop``
    (through a link to another document), ``comparison`` (of two documents), ``unanswerable`` (no document
    states it; the answer is ``unknown``)."""
    document_id: str
    needs: tuple[Paragraph, ...] = ()
    """The paragraphs that are needed for the answer."""
    accepted: tuple[str, ...] = ()
    """An answer that contains one of these is right. Empty: the answer must be ``answer`` itself."""

    def is_answered_by(self, answer: str) -> bool:
        """Whether ``answer`` is right; case does not matter."""
        given = answer.strip(" .\n").casefold()
        if self.accepted:
            return any(text.casefold() in given for text in self.accepted)
        return given == self.answer.strip(" .\n").casefold()


_HERE = Path(__file__).parent
_CORPUS = _HERE / "corpus"


def demo_model_path() -> Path:
    """The directory for ``AutoModelForCausalLM`` and ``AutoTokenizer``."""
    return _HERE / "model"


def demo_writer_path() -> Path:
    """The directory of the writer for SmolLM2-135M-Instruct, for ``writer`` and ``--writer``."""
    return _HERE / "writer"


def demo_corpus_path() -> Path:
    """The directory of the demo corpus: ``*.txt`` files with names that are not in the training data."""
    return _CORPUS


def demo_questions() -> tuple[Question, ...]:
    """The questions on the demo corpus; ``document_id`` is the file name without ``.txt``."""
    return _questions("questions.json")


def handbook_path() -> Path:
    """The directory of the handbook: ``*.md`` files about a line of cargo bikes that does not exist."""
    return _HERE / "handbook"


def handbook_questions() -> tuple[Question, ...]:
    """The questions on the handbook; ``document_id`` is the file name without ``.md``.

    Of those that full prefill answers right, they are the twelve with the largest margin: the smallest
    difference in log probability between a token and the next best one, up to the end of the accepted text.
    Blending had no part in this choice, but the handbook was reworded where it mixed up similar sentences.
    """
    return _questions("handbook_questions.json")


def _questions(file: str) -> tuple[Question, ...]:
    def read(
        text: str, document_id: str, answer: str = "", kind: str = "direct",
        needs: Sequence[Sequence[Any]] = (), accepted: Sequence[str] = (),
    ) -> Question:  # fmt: skip
        paragraphs = tuple((name, index) for name, index in needs)
        return Question(text, answer or accepted[0], kind, document_id, paragraphs, tuple(accepted))

    records = json.loads((_HERE / file).read_text(encoding="utf-8"))
    return tuple(read(**record) for record in records)
