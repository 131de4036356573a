"""Documents: the same for the same seed, names and phrases dealt to splits, paragraphs that a splitter
keeps whole.
"""

import random
import re

import pytest
from semantic_text_splitter import TextSplitter
from tokenizers import Tokenizer

from blendrag.demo import demo_model_path
from blendrag.lab.training.facts import KINDS, OPENERS, SPLITS, Split, openers
from blendrag.lab.training.generator import Document, Shape, documents
from blendrag.lab.training.names import split_of

CAPACITY = 64  # tokens in a chunk of the demo
PRONOUNS = ("she", "her", "he", "his", "him", "it", "its")


def written(
    seed: int,
    split: Split = "test",
    n: int = 10,
    kind: str | None = None,
    facts: tuple[int, ...] = (2, 3),
) -> tuple[Document, ...]:
    kinds = [kind] * n if kind else [list(KINDS)[i % len(KINDS)] for i in range(n)]
    return documents(random.Random(seed), split, kinds, [Shape(facts)] * n)


def test_equal_seeds_give_equal_documents_and_others_do_not() -> None:
    assert written(7) == written(7)
    assert written(7) != written(8)


def test_no_name_is_in_two_splits() -> None:
    names = {s: {d.name for seed in range(30) for d in written(seed, s)} for s in SPLITS}
    for split, mine in names.items():
        assert len(mine) > 60
        assert {split_of(name) for name in mine} == {split}
        assert all(mine.isdisjoint(names[other]) for other in SPLITS if other != split)


def test_no_statement_has_an_opener_in_two_splits() -> None:
    for kind in KINDS.values():
        for statement in (s for a in kind.attributes for s in a.statements):
            dealt = [opener for split in SPLITS for opener in openers(statement, split)]
            assert sorted(dealt) == sorted(OPENERS)


def test_entities_of_one_kind_in_one_context_share_no_word_of_their_names() -> None:
    for seed in range(20):
        words = [w for d in written(seed, n=8, kind="person") for w in d.name.split()]
        assert len(words) == len(set(words))


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of train"):
        written(0, "dev")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_later_paragraphs_never_name_their_entity_and_refer_to_it_in_every_sentence(
    kind: str,
) -> None:
    for seed in range(20):
        for document in written(seed, n=4, kind=kind, facts=(2, 2, 2)):
            assert document.name in document.paragraphs[0]
            for paragraph in document.paragraphs[1:]:
                assert document.name not in paragraph
                for sentence in re.split(r"(?<=\.) ", paragraph):
                    words = set(re.findall(r"[a-z]+", sentence.lower()))
                    assert words & {document.alias.lower(), document.role, *PRONOUNS}


def test_alias_and_role_stand_in_the_naming_paragraph() -> None:
    for document in written(2, n=50):
        assert document.alias in document.paragraphs[0]
        assert document.role in document.paragraphs[0]


def test_facts_stand_in_the_paragraph_they_say() -> None:
    for document in written(3, n=50, facts=(1, 2, 1, 2)):
        assert len(document.facts) == 6
        for fact in document.facts:
            assert fact.value in document.paragraphs[fact.paragraph]


def test_distractors_of_one_context_do_not_share_a_value() -> None:
    people = written(4, n=6, kind="person")
    for attribute in KINDS["person"].plain:
        said = [f.value for d in people for f in d.facts if f.attribute.key == attribute.key]
        assert len(said) == len(set(said))


def test_links_lead_to_documents_of_the_same_context() -> None:
    kinds = ["person", "organisation", "organisation"]
    linked = documents(random.Random(0), "test", kinds, [Shape()] * 3, link_share=1.0)
    employer = linked[0].fact("employer") or linked[0].fact("home")
    assert employer is not None
    assert employer.value in {d.name for d in linked[1:]}


@pytest.mark.parametrize("kind", KINDS)
def test_the_splitter_cuts_between_the_paragraphs_and_nowhere_else(kind: str) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    splitter = TextSplitter.from_huggingface_tokenizer(tokenizer, CAPACITY)
    shape = Shape(
        (2, 3), CAPACITY, lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
    )
    for document in documents(random.Random(5), "test", [kind] * 40, [shape] * 40):
        assert tuple(splitter.chunks(document.text)) == document.paragraphs
