"""``BlendNodeParser``: exact substrings of a document within the limit of a chunk."""

from __future__ import annotations

import random
from typing import Any

import pytest
from llama_index.core.ingestion.pipeline import get_transformation_hash
from llama_index.core.schema import Document, MetadataMode, NodeRelationship
from pydantic import ValidationError

from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from llama_index.llms.blendrag import BlendNodeParser

WORDS = [
    "town", "Place32", "quite", "lovely.", "東京に港があります。", "أين الميناء؟", "🚢", "<|end|>", "x" * 90,
]  # fmt: skip
JOINTS = [" ", "\n", "\n\n", "\t", "  \n ", " "]


def random_text(seed: int, words: int = 300) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(JOINTS) for _ in range(words))


@pytest.fixture
def parser(engine: BlendEngine) -> BlendNodeParser:
    return BlendNodeParser(engine=engine)


def test_pieces_are_exact_substrings_within_the_limit(
    parser: BlendNodeParser, engine: BlendEngine
) -> None:
    text = random_text(0)
    nodes = parser.get_nodes_from_documents([Document(text=text)])
    assert len(nodes) > 3
    assert parser([Document(text=" \n ")]) == []
    assert "".join("".join(n.text for n in nodes).split()) == "".join(text.split())
    for node in nodes:
        assert node.text == text[node.start_char_idx : node.end_char_idx] == node.text.strip()
        assert len(engine.tokens.encode_text(node.text)) <= 64


def test_documents_are_cut_as_ingest_cuts_them(
    parser: BlendNodeParser, engine: BlendEngine
) -> None:
    corpus = engine.corpus
    assert corpus is not None
    source = corpus.sources()[0]
    with open(source, encoding="utf-8") as file:
        pieces = parser.split_text(file.read())
    assert pieces == [chunk.text for chunk in corpus.chunks_of(source)]


def test_metadata_counts_against_the_limit(engine: BlendEngine) -> None:
    document = Document(text=random_text(9), metadata={"file": "a town called Place32"})
    encode = engine.tokens.encode_text
    nodes = BlendNodeParser(engine=engine, chunk_tokens=128)([document])
    lengths = [len(encode(node.get_content(MetadataMode.LLM))) for node in nodes]
    assert max(lengths) <= 128
    parser = BlendNodeParser(engine=engine, chunk_tokens=128, count_metadata=False)
    without = parser([document])
    assert max(len(encode(n.get_content(MetadataMode.LLM))) for n in without) > 128
    assert max(len(encode(n.text)) for n in without) <= 128
    other = Document(text=document.text, metadata={"date": "the day after tomorrow" * 9})
    assert [node.text for node in parser([other])] == [node.text for node in without]


def test_a_limit_that_is_too_small_is_refused_in_a_sentence(engine: BlendEngine) -> None:
    document = Document(text="x", metadata={"file": "a town called Place32"})
    for limit, says in (
        (64, r"takes \d+ of a chunk's 64 tokens, expected it to"),
        (3, "chunk_tokens is 3, expected a whole number, 64 to"),
    ):
        with pytest.raises(InvalidInputError, match=says):
            BlendNodeParser(engine=engine, chunk_tokens=limit, count_metadata=limit > 3)([document])
    wrong: dict[str, Any] = {"chunk_size": 64}
    with pytest.raises(ValidationError, match=r"chunk_size: not a field .* chunk_tokens"):
        BlendNodeParser(engine=engine, **wrong)


async def test_nodes_know_their_document_and_neighbours(parser: BlendNodeParser) -> None:
    document = Document(text=random_text(1), metadata={"a": 1}, excluded_llm_metadata_keys=["a"])
    document.excluded_embed_metadata_keys = ["a"]
    nodes = await parser.acall([document])
    assert {node.ref_doc_id for node in nodes} == {document.doc_id}
    assert all(node.metadata == {"a": 1} for node in nodes)
    assert nodes[0].relationships[NodeRelationship.NEXT].node_id == nodes[1].node_id


def test_a_pipelines_cache_tells_limits_apart(engine: BlendEngine) -> None:
    document = Document(text="x")
    same, other = (BlendNodeParser(engine=engine, chunk_tokens=n) for n in (64, 128))
    hashes = {
        get_transformation_hash([document], p) for p in (same, BlendNodeParser(engine=engine))
    }
    assert len(hashes) == 1
    assert get_transformation_hash([document], other) not in hashes
