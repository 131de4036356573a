"""What is asked: a question, its accepted answers, and the chunks it is asked over.

Owns the two types every dataset becomes. Does not know where they come from, which model answers or
what an answer is worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from blendrag.store.identity import digest_fields

#: Which of a question's figures is its score: whole answers, words found, or the longest common
#: subsequence (summaries).
Metric = Literal["accuracy", "f1", "rouge_l"]


@dataclass(frozen=True)
class Case:
    """One question. ``context_id`` names the chunks: cases that share it follow one another."""

    case_id: str
    context_id: str
    kind: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[str, ...]
    """Texts in prompt order; empty for the question asked without context."""

    @property
    def digest(self) -> str:
        """Of all that decides an answer and its score."""
        fields = (self.kind, self.question, *self.answers, "", *self.chunks)
        return digest_fields(field.encode("utf-8", "surrogatepass") for field in fields)


@dataclass(frozen=True)
class Dataset:
    """Cases, grouped by context, and the figure they are scored by."""

    name: str
    metric: Metric
    cases: tuple[Case, ...]
    n_chunks: int
    """Most chunks of a prompt."""
    chunk_tokens: int
    """Most tokens of a chunk, as asked for."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """By name, so that the order does not depend on what was asked first."""
        return tuple(sorted({case.kind for case in self.cases}))


def by_context(cases: tuple[Case, ...] | list[Case]) -> Iterator[tuple[Case, ...]]:
    """Neighbours that share their chunks."""
    for _, group in groupby(cases, key=lambda case: case.context_id):
        yield tuple(group)
