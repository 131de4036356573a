"""The generated dataset: documents nobody has heard of, asked about by kind of question.

Owns nothing but the way from the generator's contexts to cases; what is written and asked is
:mod:`blendrag.demo`'s. Contexts are of one seed and split, so that nothing tested was trained on.
"""

from __future__ import annotations

from typing import cast, get_args

from blendrag.errors import InvalidInputError
from blendrag.lab.evaluation.cases import Case, Dataset
from blendrag.lab.training.facts import Split
from blendrag.lab.training.questions import contexts
from blendrag.model.tokens import Tokens

NAME = "synthetic"
#: More questions than a context has of any kind.
ALL = 1000


def synthetic_dataset(
    tokens: Tokens,
    seed: int = 1,
    split: str = "test",
    n_contexts: int = 20,
    n_chunks: int = 6,
    chunk_tokens: int = 64,
    n_questions: int | None = None,
) -> Dataset:
    """``n_contexts`` of ``n_chunks`` chunks and their questions, at most ``n_questions`` of each
    context, kinds taking turns.

    Raises :class:`InvalidInputError` for a split that does not exist.
    """
    if split not in get_args(Split):
        raise InvalidInputError(f"split {split!r} is not one of {', '.join(get_args(Split))}")
    cases: list[Case] = []
    made = contexts(
        tokens.tokenizer,
        seed,
        cast(Split, split),
        n_contexts,
        n_chunks,
        chunk_tokens,
        n_questions or ALL,
    )
    for number, context in enumerate(made):
        context_id = f"{split}/{seed}/{number}"
        asked = [
            Case(f"{context_id}/{i}", context_id, q.kind, q.text, (q.answer,), context.chunks)
            for i, q in enumerate(context.questions)
        ]
        cases += _in_turns(asked, n_questions or len(asked))
    return Dataset(NAME, "accuracy", tuple(cases), n_chunks, chunk_tokens)


def _in_turns(cases: list[Case], n: int) -> list[Case]:
    """The first ``n`` when kinds take turns, in their old order."""
    rank: dict[str, int] = {}
    order = []
    for case in cases:
        rank[case.kind] = rank.get(case.kind, 0) + 1
        order.append(rank[case.kind])
    chosen = sorted(range(len(cases)), key=lambda i: (order[i], i))[:n]
    return [cases[i] for i in sorted(chosen)]
