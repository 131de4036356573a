"""Stock query engines load the stored KV of the chunks they quote."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle

from blendrag.engine import BlendEngine
from llama_index.llms.blendrag import BlendLLM, BlendRetriever

QUESTION = "What does document 3 say about the town of Place32?"
MODES = ["compact", "refine", "tree_summarize"]


def assert_reused(metrics: list[dict[str, Any]], nodes: list[Any], engine: BlendEngine) -> None:
    """Every node was found as a chunk in some call, and all its tokens were loaded."""
    found = [chunk for call in metrics for chunk in call["chunks"]]
    assert {chunk["chunk_id"] for chunk in found} == {n.node.node_id for n in nodes}
    assert {chunk["outcome"] for chunk in found} <= {"blended", "exact"}
    tokens = sum(len(engine.resources.text_ids(n.node.text)) for n in nodes)
    assert sum(call["reused_tokens"] for call in metrics) >= tokens > 150


class WithMetadata(BaseNodePostprocessor):
    """Lets LlamaIndex write ``key: value`` lines before each text, as it does by default."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        for node in nodes:
            node.node.excluded_llm_metadata_keys = []
        return nodes


@pytest.mark.parametrize("mode", MODES)
async def test_a_query_engine_reuses_every_chunk(
    llm: BlendLLM, retriever: BlendRetriever, engine: BlendEngine, seen: Any, mode: str
) -> None:
    """Sync, async and streamed, with the same answer."""
    made = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode)
    streaming = RetrieverQueryEngine.from_args(
        retriever, llm=llm, response_mode=mode, streaming=True
    )
    response = made.query(QUESTION)
    assert len(response.source_nodes) == 4
    assert len(seen.metrics) == (4 if mode == "refine" else 1)
    assert_reused(seen.metrics, response.source_nodes, engine)
    seen.raws.clear()
    assert str(await made.aquery(QUESTION)) == str(response)
    assert_reused(seen.metrics, response.source_nodes, engine)
    seen.raws.clear()
    streamed = "".join(streaming.query(QUESTION).response_gen)
    assert streamed.strip() == str(response).strip()
    assert_reused(seen.metrics, response.source_nodes, engine)


def test_metadata_written_before_a_chunk_does_not_hide_it(
    llm: BlendLLM, retriever: BlendRetriever, engine: BlendEngine, seen: Any
) -> None:
    query_engine = RetrieverQueryEngine.from_args(
        retriever, llm=llm, node_postprocessors=[WithMetadata()]
    )
    response = query_engine.query(QUESTION)
    assert "distance: " in str(seen.prompts[0])
    assert_reused(seen.metrics, response.source_nodes, engine)
