"""``BlendTextSplitter``: pieces are exact substrings within the limit."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from samples import CATS, FOXES, SHIPS

import tiny
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from langchain_blendrag import BlendTextSplitter, BlendVectorStore, ChatBlend


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


def test_the_kv_of_every_piece_is_loaded_for_a_prompt(empty: BlendEngine) -> None:
    text = "\n\n".join(f"{CATS} {SHIPS} {FOXES} {i}" for i in range(3))
    pieces = BlendTextSplitter(engine=empty).create_documents([text])
    BlendVectorStore(engine=empty).add_documents(pieces)
    prompt = "\n\n".join([*(p.page_content for p in pieces), "Question: who sleeps?"])
    told = ChatBlend(engine=empty).invoke(prompt).response_metadata["blendrag"]
    assert len(told["chunks"]) == len(pieces) > 1
    tokens = sum(len(empty.kv_namespace.model.text_ids(piece.page_content)) for piece in pieces)
    assert told["reused_tokens"] >= tokens


def test_a_wrong_size_and_anything_but_a_text_are_refused(engine: BlendEngine) -> None:
    for options, says in (
        ({"chunk_overlap": 20}, "is 20, expected 0"),
        ({"chunk_size": 10}, r"chunk_size 10 must be a whole number in \[64, 4096\]"),
        ({"chunk_size": "5"}, "'5' must be"),
        ({"chunk_size": 99.5}, "99.5 must be"),
        ({"chunksize": 99}, r"chunksize: .*; did you mean .*chunk_size"),
    ):
        given: Any = options
        with pytest.raises(InvalidInputError, match=says) as raised:
            BlendTextSplitter(engine=engine, **given)
        assert tiny.one_sentence(str(raised.value))
    splitter: Any = BlendTextSplitter(engine=engine)
    for wrong in (None, b"x", ["x"]):
        with pytest.raises(InvalidInputError, match="expected a str"):
            splitter.split_text(wrong)
    with pytest.raises(InvalidInputError, match="expected a str"):
        splitter.count_tokens(None)
    with pytest.raises(InvalidInputError, match="expected a list of texts"):
        splitter.create_documents("x")


def test_pieces_of_a_table_have_its_header_and_their_place(engine):
    rows = "".join(f"| P-{i} | part {i} |\n" for i in range(60))
    splitter = BlendTextSplitter(engine=engine, chunk_size=96, add_start_index=True)
    text = f"Words.\n\n| sku | name |\n|---|---|\n{rows}"
    pieces = splitter.create_documents([text], [{"year": 1871}])
    assert len(pieces) > 3
    for piece in pieces[1:]:
        header, row = "| sku | name |\n|---|---|\n", text[piece.metadata["start_index"] :]
        assert piece.page_content.startswith(header)
        assert row.startswith(piece.page_content.removeprefix(header))
        assert piece.metadata["year"] == 1871
