"""A tiny model in the arena: random weights, whose answers nevertheless depend on their context."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import tiny
from blendrag.model import ModelAdapter
from blendrag_lab.evaluation.arena import Arena
from blendrag_lab.evaluation.datasets import Case, Dataset
from blendrag_lab.evaluation.ways import Way

#: Chunks by context.
CHUNKS = tuple(tuple(tiny.sentence(10 * c + i) for i in range(3)) for c in range(2))


@cache
def adapter() -> ModelAdapter:
    return tiny.adapter(tiny.llama(num_hidden_layers=2))


def cases(contexts: int = 2, questions: int = 2) -> tuple[Case, ...]:
    return tuple(
        Case(f"{c}/{q}", str(c), "odd" if q % 2 else "even", f"What of {q}?", ("ships",), CHUNKS[c])
        for c in range(contexts)
        for q in range(questions)
    )


def dataset(made: Sequence[Case] | None = None) -> Dataset:
    return Dataset("tiny", "accuracy", tuple(made if made is not None else cases()), 3, 64)


def arena(ways: Sequence[Way], made: Sequence[Case] | None = None) -> Arena:
    return Arena(adapter(), dataset(made), ways, max_new_tokens=4)
