"""What is said about questions that tell less than their figures look like."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blendrag.lab.evaluation.cases import Dataset
from blendrag.lab.evaluation.notes import FEW_QUESTIONS, few_questions, lone_chunks, reuse_suffices
from blendrag.lab.evaluation.rows import Row
from lab.evaluation import lab


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


def answered(policy: str, *scores: float, recovered: float = 0.0) -> Row:
    """``scores`` of one question in each context."""
    mean = sum(scores) / len(scores)
    made = Row(
        "tiny", 1, policy, "", True, 0.15, 0.15, "all", len(scores), mean, None, None, None, 0.1, 1.0,
        "f1", mean, mean, None, 0.9, 0.9, 6, 512,
    )  # fmt: skip
    kept = {"recovered": recovered, "recovered_low": recovered - 0.1, "recovered_high": 1.0}
    return replace(made, by_context=tuple((1, score) for score in scores), **kept)  # type: ignore[arg-type]


def test_reuse_that_no_policy_beats_by_more_than_the_interval_is_named() -> None:
    reuse = answered("reuse", 0.0, 1.0, 0.0, 1.0)
    chance = answered("query", 0.0, 1.0, 1.0, 1.0, recovered=0.3)
    note = reuse_suffices([reuse, chance])
    assert note.startswith(
        "recomputing nothing scored as well: reuse 0.500, the best policy (query) 0.750"
    )
    assert note.endswith("by KL per token query is closer to full prefill (0.30 recovered)")
    assert reuse_suffices([reuse, answered("hkvd", 0.0, 0.0, 1.0, 1.0)]).endswith(
        "nor is any policy closer to full prefill by KL per token"
    )


def test_a_policy_that_beats_reuse_leaves_nothing_to_say() -> None:
    reuse = answered("reuse", 0.0, 0.1, 0.0, 0.2)
    assert reuse_suffices([reuse, answered("query", 1.0, 1.0, 1.0, 1.0)]) == ""
    assert reuse_suffices([reuse, answered("full", 0.0, 0.0, 0.0, 0.0)]) == ""
    assert reuse_suffices([answered("query", 0.0, 0.0)]) == ""
