"""The generator: the same for the same seed, names dealt to splits, paragraphs that a splitter
keeps whole.
"""

import random

import pytest
from semantic_text_splitter import TextSplitter
from tokenizers import Tokenizer

from blendrag.demo import demo_model_path
from blendrag.demo.facts import KINDS
from blendrag.demo.generator import generate_corpus
from blendrag.demo.names import SPLITS, split_of

CAPACITY = 64  # tokens in a chunk of the demo


def test_equal_seeds_give_equal_corpora_and_others_do_not() -> None:
    assert generate_corpus(7, "train", 20) == generate_corpus(7, "train", 20)
    assert generate_corpus(7, "train", 20) != generate_corpus(8, "train", 20)


def test_no_name_is_in_two_splits() -> None:
    names = {s: {d.name for d in generate_corpus(1, s, 600).documents} for s in SPLITS}
    for split, mine in names.items():
        assert len(mine) > 100
        assert {split_of(name) for name in mine} == {split}
        assert all(mine.isdisjoint(names[other]) for other in SPLITS if other != split)


def test_people_of_one_context_share_no_word_of_their_names() -> None:
    for seed in range(20):
        words = [w for d in generate_corpus(seed, "test", 12).documents for w in d.name.split()]
        assert len(words) == len(set(words))


def test_an_unknown_split_or_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of train"):
        generate_corpus(0, "dev", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected some of person"):
        generate_corpus(0, "train", 1, kinds=["planet"])


def test_the_second_paragraph_never_names_its_entity() -> None:
    for document in generate_corpus(2, "test", 300).documents:
        naming, referring = document.paragraphs
        assert document.name in naming
        assert not any(word in referring for word in document.name.split()[:1])


def test_answers_stand_in_the_paragraph_their_kind_says() -> None:
    corpus = generate_corpus(3, "test", 100)
    documents = {d.doc_id: d for d in corpus.documents}
    kinds = {"direct": 0, "coreference": 1}
    assert {q.kind for q in corpus.questions} == set(kinds)
    for question in corpus.questions:
        document = documents[question.document_id]
        assert document.name in question.text
        assert question.answer in document.paragraphs[kinds[question.kind]]
        assert 1 <= len(question.answer.split()) <= 4


def test_distractors_of_one_corpus_do_not_share_a_value() -> None:
    corpus = generate_corpus(4, "test", 6, kinds=["person"])
    for attribute in KINDS["person"].attributes:
        said = [
            f.value for d in corpus.documents for f in d.facts if f.attribute.key == attribute.key
        ]
        assert len(said) == len(set(said))


@pytest.mark.parametrize("kind", KINDS)
def test_the_splitter_cuts_between_the_paragraphs_and_nowhere_else(kind: str) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    splitter = TextSplitter.from_huggingface_tokenizer(tokenizer, CAPACITY)
    documents = generate_corpus(5, "test", 150, kinds=[kind]).documents
    for document in random.Random(0).sample(documents, 60):
        assert tuple(splitter.chunks(document.text)) == document.paragraphs
