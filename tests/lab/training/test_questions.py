"""Questions: each has the answer that its documents state, and needs the paragraphs it says."""

import random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from blendrag.demo import demo_model_path
from blendrag.lab.training.contexts import Context, contexts, sizes
from blendrag.lab.training.questions import KINDS_OF_QUESTION, UNKNOWN


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def made(tokenizer: PreTrainedTokenizerBase) -> list[Context]:
    return list(contexts(tokenizer, 1, "test", 60, 6, 64, questions=3))


def test_equal_seeds_give_equal_contexts(tokenizer: PreTrainedTokenizerBase) -> None:
    once, again = (next(contexts(tokenizer, 5, "test", 1)) for _ in range(2))
    assert once == again
    assert once != next(contexts(tokenizer, 6, "test", 1))


def test_every_kind_is_asked(made: list[Context]) -> None:
    asked = {question.kind for context in made for question in context.questions}
    assert asked == set(KINDS_OF_QUESTION)


def test_the_paragraphs_needed_hold_the_answer(made: list[Context]) -> None:
    for context in made:
        by_id = {d.doc_id: d for d in context.documents}
        for question in context.questions:
            needed = [by_id[doc_id].paragraphs[index] for doc_id, index in question.needs]
            if question.kind == "unanswerable":
                assert (question.answer, needed) == (UNKNOWN, [])
                continue
            text = "\n".join(needed)
            assert question.answer in text
            assert set(needed) <= set(context.chunks)
            if question.kind == "direct":
                (paragraph,) = needed
                assert paragraph == by_id[question.document_id].paragraphs[0]
            if question.kind == "coreference":
                assert len(needed) > 1
                assert question.answer in needed[-1]
            if question.kind in ("two-hop", "comparison"):
                assert len({doc_id for doc_id, _ in question.needs}) == 2


def test_a_two_hop_question_does_not_name_the_document_that_answers(made: list[Context]) -> None:
    for context in made:
        names = {d.doc_id: d.name for d in context.documents}
        for question in (q for q in context.questions if q.kind == "two-hop"):
            answering = question.needs[-1][0]
            assert names[answering] not in question.text
            assert names[question.document_id] in question.text


def test_the_earlier_one_is_the_answer_of_a_comparison(made: list[Context]) -> None:
    for context in made:
        years = {d.name: f.value for d in context.documents if (f := d.fact("year"))}
        for question in (q for q in context.questions if q.kind == "comparison"):
            (other,) = [n for n in years if n in question.text and n != question.answer]
            assert int(years[question.answer]) < int(years[other])


def test_what_is_unanswerable_is_said_of_another_of_the_kind(made: list[Context]) -> None:
    for context in made:
        by_id = {d.doc_id: d for d in context.documents}
        for question in (q for q in context.questions if q.kind == "unanswerable"):
            mine = by_id[question.document_id]
            others = {
                f.attribute.key for d in context.documents if d.kind == mine.kind for f in d.facts
            }
            assert others - {f.attribute.key for f in mine.facts}


@pytest.mark.parametrize("chunk_tokens", [64, 128, 512])
def test_chunks_are_as_long_as_asked_and_no_longer(
    tokenizer: PreTrainedTokenizerBase, chunk_tokens: int
) -> None:
    for context in contexts(tokenizer, 2, "test", 6, 6, chunk_tokens):
        assert len(context.chunks) == 6
        lengths = [len(tokenizer.encode(c, add_special_tokens=False)) for c in context.chunks]
        assert max(lengths) <= chunk_tokens
        assert min(lengths) > chunk_tokens * 0.7


def test_documents_take_two_to_four_chunks_as_far_as_that_adds_up() -> None:
    for n in range(2, 20):
        for seed in range(20):
            made = sizes(random.Random(seed), n)
            assert sum(made) == n
            assert all(2 <= size <= 4 for size in made)
