"""``BlendVectorStore`` refuses in a sentence what Python would take for something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from pydantic import ValidationError
from texts import CATS, SHIPS, documents

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from langchain_blendrag import BlendVectorStore


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path / "store") as made:
        yield made


@pytest.fixture
def store(engine: BlendEngine) -> BlendVectorStore:
    return BlendVectorStore(engine=engine)


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a text for texts": (lambda v: v.add_texts("hello"), "a list of texts"),
    "a text for ids": (lambda v: v.delete("ab"), "a list of texts"),
    "a text to get by": (lambda v: v.get_by_ids("ab"), "a list of texts"),
    "a text for a document": (lambda v: v.add_documents(["x"]), "use add_texts"),
    "one document": (lambda v: v.add_documents(Document("x")), "a list of Document"),
    "no query": (lambda v: v.similarity_search(None), "expected a text"),
    "k as text": (lambda v: v.similarity_search("x", k="2"), "whole number"),
    "a negative k": (lambda v: v.similarity_search("x", k=-1), "0 or more"),
    "a misspelt option": (lambda v: v.similarity_search("x", top_k=2), "top_k: not an option"),
    "a misspelt option of a retriever": (
        lambda v: v.as_retriever(search_kwargs={"score_threshold": 0.5}).invoke("x"),
        "similarity_score_threshold",
    ),
    "a misspelt option of mmr": (
        lambda v: v.max_marginal_relevance_search("x", lambda_=1),
        "lambda_mult",
    ),
    "an operator": (
        lambda v: v.similarity_search("x", filter={"source": {"$in": ["a"]}}),
        "a function of a document",
    ),
    "embedding": (lambda v: type(v)("demo"), "model="),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_python_would_take_for_something_else_is_refused(
    store: BlendVectorStore, case: str
) -> None:
    store.add_documents(documents(CATS), ids=["a"])
    wrong, says = WRONG[case]
    with pytest.raises(InvalidInputError, match=says) as raised:
        wrong(store)
    assert tiny.one_sentence(str(raised.value))
    assert [doc.id for doc in store.similarity_search("cats", k=9)] == ["a"]


def test_wrong_arguments_are_named(store: BlendVectorStore, engine: BlendEngine) -> None:
    with pytest.raises(InvalidInputError, match="1 ids for 2 documents"):
        store.add_documents(documents(CATS, SHIPS), ids=["1"])
    with pytest.raises(InvalidInputError, match="batchsize: not an option of add_documents"):
        store.add_documents([], batchsize=3)
    with pytest.raises(InvalidInputError, match="metadata"):
        store.add_documents([Document(CATS, metadata={"x": object()})], ids=["1"])
    with pytest.raises(ValidationError, match="leave model out"):
        BlendVectorStore(model="demo", engine=engine)
