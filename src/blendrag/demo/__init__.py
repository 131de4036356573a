"""The embedded default model `demo`: its weights, its corpus, and the questions that show the
point.

Owns: where they lie inside the package. Importing this loads neither torch nor transformers.
"""

import json
from dataclasses import dataclass
from pathlib import Path

Paragraph = tuple[str, int]
"""(doc_id, index) of a paragraph."""


@dataclass(frozen=True)
class Question:
    """A plain-language question with its one short answer.

    `kind`: `direct` (a naming paragraph states it), `coreference` (a later paragraph does), `two-hop`
    (along a link to another document), `comparison` (of two documents), `unanswerable` (no document
    states it; the answer is `unknown`). `needs`: the paragraphs without which it has no answer.
    """

    text: str
    answer: str
    kind: str
    document_id: str
    needs: tuple[Paragraph, ...] = ()


_HERE = Path(__file__).parent


def demo_model_path() -> Path:
    """The directory to give to `AutoModelForCausalLM` and `AutoTokenizer`."""
    return _HERE / "model"


def demo_corpus_path() -> Path:
    """The directory of the demo corpus: `*.txt` files, names unseen in training."""
    return _HERE / "corpus"


def demo_questions() -> tuple[Question, ...]:
    """The questions of the demo corpus with their expected answers; `document_id` is the file
    name without `.txt`.
    """
    records = json.loads((_HERE / "questions.json").read_text(encoding="utf-8"))
    return tuple(
        Question(**record | {"needs": tuple((doc_id, index) for doc_id, index in record["needs"])})
        for record in records
    )


__all__ = ["Paragraph", "Question", "demo_corpus_path", "demo_model_path", "demo_questions"]
