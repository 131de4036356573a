"""Retrievers find stored chunks, and stock query engines load the KV of those they quote."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llm_standard_tests import gathered

from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from llama_index.llms.blendrag import BlendLLM, BlendRetriever, BlendReuseEvent
from llama_index.llms.blendrag.retrievers import node_with_score
from paragraphs import assert_reused

QUESTION = "What does document 3 say about the company of Place2114?"


async def test_a_node_is_the_chunk_and_says_where_it_is_from(
    retriever: BlendRetriever, engine: BlendEngine
) -> None:
    nodes = retriever.retrieve(QUESTION)
    assert [n.text for n in nodes] == [c.text for c in engine.retrieve(QUESTION, 4)]
    assert [n.text for n in await retriever.aretrieve(QUESTION)] == [n.text for n in nodes]
    node = nodes[0].node
    assert node.get_content(MetadataMode.LLM) == node.text.strip()
    assert node.get_content(MetadataMode.EMBED) == node.text.strip()
    assert set(node.metadata) == {"source", "title", "chunk_id", "distance", "file_date"}
    paged = replace(engine.retrieve(QUESTION, 1)[0], page=7, last_page=8)
    assert node_with_score(paged).node.metadata["page_label"] == "7–8"
    assert [n.score for n in nodes] == [c.score for c in engine.retrieve(QUESTION, 4)]
    assert all(0 <= (n.score or 0) <= 1 for n in nodes)
    text = Path(node.ref_doc_id).read_text()
    assert text[node.start_char_idx : node.end_char_idx].strip() == node.text.strip()


def test_the_search_can_be_chosen(engine: BlendEngine) -> None:
    for search in ("hybrid", "dense", "lexical"):
        nodes = BlendRetriever(engine=engine, search=search, similarity_top_k=2).retrieve(QUESTION)
        expected = engine.retrieve(QUESTION, 2, search=search)
        assert [each.node_id for each in nodes] == [each.chunk_id for each in expected]


def test_wrong_arguments_are_refused(engine: BlendEngine) -> None:
    with pytest.raises(InvalidInputError, match="search 'fuzzy' must be one of hybrid, dense"):
        BlendRetriever(engine=engine, search="fuzzy")
    with pytest.raises(
        InvalidInputError, match="similarity_top_k 0 must be a whole number of at least 1"
    ):
        BlendRetriever(engine=engine, similarity_top_k=0)
    wrong: dict[str, Any] = {"top_k": 3}
    with pytest.raises(
        InvalidInputError,
        match="top_k: not a field of BlendRetriever; did you mean similarity_top_k",
    ):
        BlendRetriever(engine=engine, **wrong)
    with pytest.raises(InvalidInputError, match="leave store out"):
        BlendRetriever(engine=engine, store="kv")
    with pytest.raises(InvalidInputError, match="the question is empty"):
        BlendRetriever(engine=engine).retrieve(" ")


def test_metrics_are_read_from_a_query_engine_as_the_page_shows(
    llm: BlendLLM, retriever: BlendRetriever, seen: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "integrations.md").read_text()
    (snippet,) = re.findall(r"```python\n([^`]*class ReusePrinter.*?)```", page, re.DOTALL)
    handlers = list(get_dispatcher().event_handlers)
    try:
        exec(snippet, {"query_engine": RetrieverQueryEngine.from_args(retriever, llm=llm)})
    finally:
        get_dispatcher().event_handlers[:] = handlers
    (metrics,) = seen.metrics
    reused, prompt = metrics["reused_tokens"], metrics["prompt_tokens"]
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"{reused} of {prompt} prompt tokens reused"
    assert second.startswith(f"first token after {metrics['ttft_s']:.2f} s")


class WithMetadata(BaseNodePostprocessor):
    """Lets LlamaIndex write ``key: value`` lines before each text, as it does by default."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        for node in nodes:
            node.node.excluded_llm_metadata_keys = []
        return nodes


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize"])
async def test_a_query_engine_reuses_every_chunk(
    llm: BlendLLM, retriever: BlendRetriever, engine: BlendEngine, seen: Any, mode: str
) -> None:
    """Sync, async and streamed, with the same answer."""
    made = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode)
    streaming = RetrieverQueryEngine.from_args(
        retriever, llm=llm, response_mode=mode, streaming=True
    )
    response = made.query(QUESTION)
    chunks = {node.node_id: node.text for node in response.source_nodes}
    assert len(chunks) == 4
    requests = 4 if mode == "refine" else 1
    assert str(await made.aquery(QUESTION)) == str(response)
    streamed = "".join(streaming.query(QUESTION).response_gen)
    assert streamed.strip() == str(response).strip()
    assert len(seen.metrics) == 3 * requests
    for first in range(0, 3 * requests, requests):
        assert_reused(seen.metrics[first : first + requests], chunks, engine)


def test_a_query_emits_what_was_reused(
    llm: BlendLLM, retriever: BlendRetriever, engine: BlendEngine, seen: Any
) -> None:
    """Metadata written before a chunk does not hide it."""
    query_engine = RetrieverQueryEngine.from_args(
        retriever, llm=llm, node_postprocessors=[WithMetadata()]
    )
    response = query_engine.query(QUESTION)
    assert "distance: " in str(seen.of(LLMChatStartEvent)[0].messages)
    chunks = {node.node_id: node.text for node in response.source_nodes}
    assert_reused(seen.metrics, chunks, engine)
    (event,) = seen.of(BlendReuseEvent)
    assert event.reused_tokens == seen.metrics[0]["reused_tokens"]
    assert event.reused_tokens + event.fresh_tokens == event.prompt_tokens
    assert event.reused_share == event.reused_tokens / event.prompt_tokens
    assert {chunk["chunk_id"] for chunk in event.chunks} == set(chunks)
    assert event.ttft_s > 0
    assert event.model_name == engine.model_name
    assert event.model_dump(mode="json")["class_name"] == "BlendReuseEvent"


async def test_every_answer_emits_one_event_in_the_span_of_its_call(
    llm: BlendLLM, seen: Any
) -> None:
    messages = [ChatMessage(role="user", content=QUESTION)]
    llm.chat(messages)
    list(llm.stream_chat(messages))
    await llm.achat(messages)
    await gathered(llm.astream_chat(messages))
    spans = [event.span_id for event in seen.of(BlendReuseEvent)]
    assert spans == [event.span_id for event in seen.of(LLMChatStartEvent)]
    assert len(set(spans)) == 4
    llm.complete(QUESTION)
    list(llm.stream_complete(QUESTION))
    assert len(seen.of(BlendReuseEvent)) == 6
