"""The embedded default model `demo`: its weights, its corpus, and the questions that show the
point.

Owns: where they lie inside the package. Importing this loads neither torch nor transformers.
"""

import json
from pathlib import Path

from blendrag.demo.questions import Question

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


__all__ = ["Question", "demo_corpus_path", "demo_model_path", "demo_questions"]
