"""Generated documents and questions: seeded, split by names, answerable as they state."""

import random
import re

import pytest
from semantic_text_splitter import TextSplitter
from transformers import PreTrainedTokenizerBase

from blendrag.errors import InvalidInputError
from blendrag_lab.synthetic.generator import (
    KINDS,
    OPENERS,
    SPLITS,
    Dealer,
    GeneratedDocument,
    Shape,
    Split,
    documents,
    openers,
    split_of,
)
from blendrag_lab.synthetic.questions import (
    KINDS_OF_QUESTION,
    UNKNOWN,
    Context,
    contexts,
    measure_of,
    sizes,
)

CAPACITY = 64  # tokens of a chunk of the demo
PRONOUNS = ("she", "her", "he", "his", "him", "it", "its")


@pytest.fixture(scope="module")
def made(tokenizer: PreTrainedTokenizerBase) -> list[Context]:
    return list(contexts(tokenizer, 1, "test", 40, 6, 64, questions=3))


def written(
    seed: int,
    split: Split = "test",
    n: int = 10,
    kind: str | None = None,
    facts: tuple[int, ...] = (2, 3),
) -> tuple[GeneratedDocument, ...]:
    kinds = [kind] * n if kind else [list(KINDS)[i % len(KINDS)] for i in range(n)]
    return documents(random.Random(seed), split, kinds, [Shape(facts)] * n)


def test_no_name_is_in_two_splits():
    for split in SPLITS:
        names = {d.name for seed in range(20) for d in written(seed, split)}
        assert len(names) > 40
        assert {split_of(name) for name in names} == {split}


def test_no_statement_has_an_opener_in_two_splits():
    for kind in KINDS.values():
        for statement in (s for a in kind.attributes for s in a.statements):
            dealt = [opener for split in SPLITS for opener in openers(statement, split)]
            assert sorted(dealt) == sorted(OPENERS)


def test_names_of_one_context_share_no_word_and_values_do_not_repeat():
    for seed in range(10):
        people = written(seed, n=6, kind="person")
        words = [word for d in people for word in d.name.split()]
        assert len(words) == len(set(words))
        for attribute in KINDS["person"].plain:
            said = [f.value for d in people for f in d.facts if f.attribute.key == attribute.key]
            assert len(said) == len(set(said))


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_first_paragraph_names_the_entity_and_every_later_sentence_refers_to_it(kind):
    for seed in range(10):
        for document in written(seed, n=4, kind=kind, facts=(2, 2, 2)):
            first, *later = document.paragraphs
            assert all(word in first for word in (document.name, document.alias, document.role))
            for sentence in (s for text in later for s in re.split(r"(?<=\.) ", text)):
                assert document.name not in sentence
                words = set(re.findall(r"[a-z]+", sentence.lower()))
                assert words & {document.alias.lower(), document.role, *PRONOUNS}
            assert len(document.facts) == 6
            assert all(fact.value in document.paragraphs[fact.paragraph] for fact in document.facts)


def test_links_lead_to_documents_of_the_same_context():
    kinds = ["person", "organisation", "organisation"]
    linked = documents(random.Random(0), "test", kinds, [Shape()] * 3, link_share=1.0)
    facts = {fact.attribute.key: fact.value for fact in linked[0].facts}
    assert (facts.get("employer") or facts["home"]) in {d.name for d in linked[1:]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_splitter_cuts_between_paragraphs_only(kind, tokenizer):
    splitter = TextSplitter.from_callback(measure_of(tokenizer), CAPACITY)
    shape = Shape((2, 3), CAPACITY, measure_of(tokenizer))
    for document in documents(random.Random(5), "test", [kind] * 40, [shape] * 40):
        assert tuple(splitter.chunks(document.text)) == document.paragraphs


def test_names_are_two_tokens(tokenizer):
    dealer = Dealer(random.Random(1), "test")
    for name in [dealer.name(kind) for kind in KINDS for _ in range(40)]:
        assert len(tokenizer.encode(" " + name, add_special_tokens=False)) == 2


def test_an_unknown_split_is_refused():
    with pytest.raises(
        InvalidInputError, match="split 'exam' is not one of train, validation, test"
    ):
        written(0, "exam")  # type: ignore[arg-type]


def test_equal_seeds_give_equal_contexts(tokenizer):
    once, again = (next(contexts(tokenizer, 5, "test", 1)) for _ in range(2))
    assert once == again
    assert once != next(contexts(tokenizer, 6, "test", 1))


def test_every_question_is_of_its_kind_and_its_paragraphs_hold_the_answer(made):
    asked = [(context, question) for context in made for question in context.questions]
    assert {question.kind for _, question in asked} == set(KINDS_OF_QUESTION)
    for context, question in asked:
        by_id = {d.doc_id: d for d in context.documents}
        own = by_id[question.document_id]
        needed = [by_id[doc_id].paragraphs[index] for doc_id, index in question.needs]
        assert set(needed) <= set(context.chunks)
        if question.kind == "unanswerable":
            assert (question.answer, needed) == (UNKNOWN, [])
            alike = [d for d in context.documents if d.kind == own.kind]
            stated = {f.attribute.key for d in alike for f in d.facts}
            assert stated - {f.attribute.key for f in own.facts}
            continue
        assert question.answer in "\n".join(needed)
        if question.kind == "direct":
            assert needed == [own.paragraphs[0]]
        elif question.kind == "coreference":
            assert len(needed) > 1
            assert question.answer in needed[-1]
        else:
            assert len({doc_id for doc_id, _ in question.needs}) == 2
        if question.kind == "two-hop":
            assert by_id[question.needs[-1][0]].name not in question.text
            assert own.name in question.text
        if question.kind == "comparison":
            years = {
                document.name: fact.value
                for document in context.documents
                for fact in document.facts
                if fact.attribute.key == "year"
            }
            (other,) = [n for n in years if n in question.text and n != question.answer]
            assert int(years[question.answer]) < int(years[other])


@pytest.mark.parametrize("chunk_tokens", [64, 512])
def test_chunks_are_filled_up_to_their_size(tokenizer, chunk_tokens):
    measure = measure_of(tokenizer)
    for context in contexts(tokenizer, 2, "test", 3, 6, chunk_tokens):
        assert len(context.chunks) == 6
        assert all(chunk_tokens * 0.7 < measure(c) <= chunk_tokens for c in context.chunks)


def test_documents_take_two_to_four_chunks():
    for n in range(2, 20):
        made = [sizes(random.Random(seed), n) for seed in range(10)]
        assert {sum(each) for each in made} == {n}
        assert {size for each in made for size in each} <= {2, 3, 4}
