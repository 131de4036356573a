"""``BlendTextSplitter``: pieces are substrings within the limit that a prompt is known by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from samples import CATS, FOXES, SHIPS

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from langchain_blendrag import BlendTextSplitter, BlendVectorStore, ChatBlend


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path / "store") as made:
        yield made


def test_pieces_are_substrings_within_the_limit(engine: BlendEngine) -> None:
    text = "\n\n".join(
        f"{CATS} {SHIPS} {FOXES} 港の猫は温かい石の上で眠る。 {i}" for i in range(30)
    )
    splitter = BlendTextSplitter(engine=engine, chunk_size=96, add_start_index=True)
    pieces = splitter.split_documents([Document(text, metadata={"source": "a"})])
    assert len(pieces) > 10
    for piece in pieces:
        start = piece.metadata["start_index"]
        assert text[start : start + len(piece.page_content)] == piece.page_content
        assert splitter.count_tokens(piece.page_content) <= 96
        assert piece.metadata["source"] == "a"
    together = "".join("".join(p.page_content.split()) for p in pieces)
    assert together == "".join(text.split())


def test_every_piece_is_recognised_in_a_prompt(
    engine: BlendEngine,
) -> None:
    text = "\n\n".join(f"{CATS} {SHIPS} {FOXES} {i}" for i in range(6))
    pieces = BlendTextSplitter(engine=engine).create_documents([text])
    BlendVectorStore(engine=engine).add_documents(pieces)
    told = (
        ChatBlend(engine=engine)
        .invoke("\n\n".join([*(p.page_content for p in pieces), "Question: who sleeps?"]))
        .response_metadata["blendrag"]
    )
    assert len(told["chunks"]) == len(pieces)


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an overlap": (lambda e: BlendTextSplitter(engine=e, chunk_overlap=20), "is 20, expected 0"),
    "a small size": (lambda e: BlendTextSplitter(engine=e, chunk_size=10), "is 10, .* 64 to 4096"),
    "no size": (lambda e: BlendTextSplitter(engine=e, chunk_size=0), "is 0, .* 64 to 4096"),
    "a size in words": (lambda e: BlendTextSplitter(engine=e, chunk_size="5"), "is '5', expected"),
    "half a token": (lambda e: BlendTextSplitter(engine=e, chunk_size=99.5), "is 99.5, expected"),
    "no text": (lambda e: BlendTextSplitter(engine=e).split_text(None), "expected a str"),
    "bytes": (lambda e: BlendTextSplitter(engine=e).split_text(b"x"), "expected a str"),
    "texts": (lambda e: BlendTextSplitter(engine=e).split_text(["x"]), "expected a str"),
    "a text for texts": (
        lambda e: BlendTextSplitter(engine=e).create_documents("x"),
        "expected a list of texts",
    ),
    "no text to count": (
        lambda e: BlendTextSplitter(engine=e).count_tokens(None),
        "expected a str",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_split_is_one_sentence(engine: BlendEngine, case: str) -> None:
    wrong, says = WRONG[case]
    with pytest.raises(InvalidInputError, match=says) as raised:
        wrong(engine)
    assert tiny.one_sentence(str(raised.value))
