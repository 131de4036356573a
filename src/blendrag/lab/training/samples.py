"""Packed samples: a context, and questions that each see the context and themselves but not one another.

Owns: how documents and questions become tokens and positions, segment by segment as the product
tokenises them. Does not know: what is shown when (`curriculum.py`), padding, the model.
"""

import random
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from blendrag.lab.training.prompts import FORMS, Entry, Form, Template, template
from blendrag.lab.training.questions import Question

# Positions skipped before a chunk in samples with gaps: contexts longer than any trained on stay
# familiar.
MAX_GAP = 400


@dataclass(frozen=True)
class Asked:
    """One question segment; the loss is on the tokens from `answer_at` on. `kind` labels it in
    evaluations.
    """

    tokens: list[int]
    answer_at: int
    kind: str = ""


@dataclass
class Sample:
    """A context with its positions, the chunk each token is in (-1: none), and the questions
    that start after it.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    questions: list[Asked] = field(default_factory=list)

    @property
    def question_position(self) -> int:
        return self.positions[-1] + 1

    def restart(self, tokens: list[int]) -> None:
        """Drops the context for one that begins with `tokens`; keeps the questions."""
        self.tokens, self.positions, self.chunks = [], [], []
        self.append(tokens)

    def append(self, tokens: list[int], chunk: int = -1, gap: int = 0) -> None:
        start = gap + (self.question_position if self.positions else 0)
        self.tokens += tokens
        self.positions += range(start, start + len(tokens))
        self.chunks += [chunk] * len(tokens)


class Writer:
    """Turns documents and questions into samples, tokenised segment by segment as the product
    does.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._encode = tokenizer.backend_tokenizer.encode
        self._templates: dict[str, Template] = {
            form.name: template(tokenizer, form) for form in FORMS
        }
        self.bos: int = tokenizer.bos_token_id
        self.end: int = tokenizer.eos_token_id
        self.n_special = len(tokenizer.all_special_ids)

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text, add_special_tokens=False).ids)

    def random_tokens(self, rng: random.Random, n: int, pool: int) -> list[int]:
        """`n` of the first `pool` tokens that are not special."""
        return [rng.randrange(self.n_special, self.n_special + pool) for _ in range(n)]

    def question(self, form: Form, text: str) -> list[int]:
        """The tokens after the last chunk, up to the answer."""
        return self.encode(self._templates[form.name].question(text))

    def sample(
        self,
        form: Form,
        entries: list[Entry],
        questions: list[Question],
        rng: random.Random | None = None,
    ) -> Sample:
        """Positions skip ahead at random before each chunk where `rng` is given."""
        layout, sample = self._templates[form.name], Sample()
        for i, (text, is_chunk) in enumerate(layout.context_segments(entries)):
            gap = rng.randrange(MAX_GAP) if rng and i and rng.random() < 0.5 else 0
            sample.append(self.encode(text), i if is_chunk else -1, gap)
        for question in questions:
            asked = self.encode(layout.question(question.text))
            # The answer keeps the space before it: after a space a word has the token that it has
            # in the documents.
            answer = [*self.encode(" " + question.answer), self.end]
            sample.questions.append(Asked(asked + answer, len(asked), question.kind))
        return sample
