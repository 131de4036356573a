"""What a reader should know before believing the rows: sentences about the questions asked.

Owns when a dataset says less than its figures look like. Does not know how it is printed.
"""

from __future__ import annotations

from blendrag.evaluation.cases import Dataset

#: Fewer questions leave intervals too wide to tell ways apart by.
FEW_QUESTIONS = 30


def lone_chunks(dataset: Dataset) -> str:
    """A sentence if prompts hold one chunk alone, whose KV lacks no other's; else empty."""
    total = len(dataset.cases)
    alone = sum(len(case.chunks) == 1 for case in dataset.cases)
    if not alone:
        return ""
    return (
        f"prompts of one chunk alone: {alone} of {total}; such a chunk has no other to attend to, so that "
        "little or nothing deviates from full prefill, whatever is recomputed, and quality looks perfect; "
        "take prompts of several (smaller --chunk-tokens, more --chunks, longer contexts)"
    )


def few_questions(dataset: Dataset) -> str:
    """A sentence if there are so few that most differences may be chance; else empty."""
    n = len(dataset.cases)
    if n >= FEW_QUESTIONS:
        return ""
    asked = "1 question leaves" if n == 1 else f"{n} questions leave"
    return (
        f"{asked} wide intervals, within which ways differ by chance; ask {FEW_QUESTIONS} or more "
        "(--contexts)"
    )
