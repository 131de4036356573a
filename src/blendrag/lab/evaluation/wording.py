"""How a case becomes the text of one user message.

Owns three wordings: the demo model's own, which it was trained on, one for questions and one for
summaries that any instructed model follows. Chunks stand between blank lines, each exactly as it was
ingested, so that the engine finds them. Without chunks the same words stand alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blendrag.demo import demo_model_path
from blendrag.engine import Options
from blendrag.engine.rendering import SEPARATOR, render
from blendrag.lab.evaluation.cases import Metric
from blendrag.lab.training.samples import CONTEXT, NATIVE, QUESTION
from blendrag.model.tokens import Tokens


@dataclass(frozen=True)
class Wording:
    """A template with holes for context and question."""

    name: str
    template: str

    def prompt(self, chunks: Sequence[str], question: str) -> str:
        """The message; ``chunks`` may be empty."""
        template = self.template
        if not chunks:
            template = template.replace(CONTEXT + SEPARATOR, "").replace(CONTEXT, "")
        filled = template.replace(QUESTION, question.strip())
        return filled.replace(CONTEXT, SEPARATOR.join(chunk.strip() for chunk in chunks)).strip()

    def head(self, tokens: Tokens) -> str:
        """What the model reads before the first chunk of any prompt."""
        return render(self.template, tokens, Options()).text.split(CONTEXT)[0]


DEMO = Wording("demo", NATIVE.messages[0][1])
SHORT_ANSWER = Wording(
    "short answer",
    "Answer the question from the passages. Reply with the answer alone, in a few words.\n\n"
    f"{CONTEXT}{SEPARATOR}Question: {QUESTION}\nAnswer:",
)
SUMMARY = Wording(
    "summary",
    f"Summarise what follows, as the examples do where there are any.\n\n{CONTEXT}{SEPARATOR}"
    f"{QUESTION}\nSummary:",
)


def wording_for(tokenizer: Any, metric: Metric) -> Wording:
    """The demo model's words for whatever speaks its chat template, plain instructions for others."""
    if getattr(tokenizer, "chat_template", None) == _demo_template():
        return DEMO
    return SUMMARY if metric == "rouge_l" else SHORT_ANSWER


def _demo_template() -> str:
    return (demo_model_path() / "chat_template.jinja").read_text(encoding="utf-8")
