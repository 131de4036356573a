"""What is said about questions that tell less than their figures look like."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blendrag.evaluation.cases import Dataset
from blendrag.evaluation.notes import FEW_QUESTIONS, few_questions, lone_chunks
from evaluation import lab


def asked(alone: int, together: int) -> Dataset:
    case = lab.cases()[0]
    lone = replace(case, chunks=case.chunks[:1])
    return lab.dataset([lone] * alone + [case] * together)


@pytest.mark.parametrize(
    ("alone", "together", "words"),
    [(3, 0, "prompts of one chunk alone: 3 of 3;"), (1, 2, "prompts of one chunk alone: 1 of 3;")],
)
def test_prompts_of_one_chunk_are_counted(alone: int, together: int, words: str) -> None:
    assert lone_chunks(asked(alone, together)).startswith(words)


def test_prompts_of_several_chunks_are_left_alone() -> None:
    assert lone_chunks(asked(0, 3)) == ""


def test_few_questions_end_at_thirty() -> None:
    assert few_questions(asked(0, FEW_QUESTIONS)) == ""
    assert few_questions(asked(0, FEW_QUESTIONS - 1)).startswith("29 questions leave wide")
    assert few_questions(asked(0, 1)).startswith("1 question leaves wide")
