"""The generator: the same for the same seed, names dealt to splits, paragraphs that a splitter
keeps whole.
"""

import random

import pytest
from semantic_text_splitter import TextSplitter
from tokenizers import Tokenizer

from blendrag.demo import demo_model_path
from blendrag.demo.facts import KINDS
from blendrag.demo.generator import Corpus, generate_corpus
from blendrag.demo.names import SPLITS, split_of

CAPACITY = 96  # tokens in a chunk of the demo


def name_words(corpus: Corpus) -> set[str]:
    """Every word that is someone's or something's name: of entities, and of people named as a
    value.
    """
    words = {
        word
        for d in corpus.documents
        for word in (d.name.split() if d.kind == "person" else d.name.split()[:1])
    }
    for document in corpus.documents:
        words |= {
            w for fact in document.facts if fact.attribute.name_of for w in fact.value.split()
        }
    return words


def test_equal_seeds_give_equal_corpora_and_others_do_not() -> None:
    assert generate_corpus(7, "train", 20) == generate_corpus(7, "train", 20)
    assert generate_corpus(7, "train", 20) != generate_corpus(8, "train", 20)


def test_no_name_is_in_two_splits() -> None:
    words = {split: name_words(generate_corpus(1, split, 600)) for split in SPLITS}
    for split, mine in words.items():
        assert len(mine) > 100
        assert {split_of(word) for word in mine} == {split}
        assert all(mine.isdisjoint(words[other]) for other in SPLITS if other != split)


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
    corpus = generate_corpus(4, "test", 6, kinds=["town"])
    for attribute in KINDS["town"].attributes:
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
