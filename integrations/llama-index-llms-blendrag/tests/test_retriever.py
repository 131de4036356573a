"""``BlendRetriever``: nodes, scores and metadata."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_index.core.schema import MetadataMode

from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from llama_index.llms.blendrag import BlendRetriever

QUESTION = "What does document 3 say about the town of Place32?"


def test_a_node_is_the_chunk_and_says_where_it_is_from(
    retriever: BlendRetriever, engine: BlendEngine
) -> None:
    nodes = retriever.retrieve(QUESTION)
    chunks = engine.retrieve(QUESTION, 4)
    assert [n.text for n in nodes] == [c.text for c in chunks]
    node = nodes[0].node
    assert node.get_content(MetadataMode.LLM) == node.text.strip()
    assert node.get_content(MetadataMode.EMBED) == node.text.strip()
    assert set(node.metadata) == {"source", "title", "chunk_id", "distance"}
    by_distance = sorted(nodes, key=lambda n: n.node.metadata["distance"])
    assert by_distance == sorted(nodes, key=lambda n: -(n.score or 0))
    assert all(-1 <= (n.score or 0) <= 1 for n in nodes)
    text = Path(node.ref_doc_id).read_text()
    assert text[node.start_char_idx : node.end_char_idx].strip() == node.text.strip()


async def test_async_retrieval_equals_sync(retriever: BlendRetriever) -> None:
    nodes = await retriever.aretrieve(QUESTION)
    assert [n.node_id for n in nodes] == [n.node_id for n in retriever.retrieve(QUESTION)]


def test_wrong_arguments_are_refused(engine: BlendEngine) -> None:
    with pytest.raises(InvalidInputError, match="similarity_top_k is 0, expected 1 or more"):
        BlendRetriever(engine=engine, similarity_top_k=0)
    with pytest.raises(InvalidInputError, match="leave store out"):
        BlendRetriever(engine=engine, store="kv")
    with pytest.raises(InvalidInputError, match="the question is empty"):
        BlendRetriever(engine=engine).retrieve(" ")
