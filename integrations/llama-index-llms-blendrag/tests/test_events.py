"""``BlendReuseEvent``, and the names by which everything here is found."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent
from llama_index.core.query_engine import RetrieverQueryEngine
from pydantic import Field

from blendrag.engine import BlendEngine
from llama_index.llms import blendrag as package
from llama_index.llms.blendrag import BlendLLM, BlendRetriever, BlendReuseEvent

QUESTION = "What does document 3 say about the town of Place32?"
NAMESPACES = {
    "retrievers": "BlendRetriever",
    "node_parser": "BlendNodeParser",
    "vector_stores": "BlendVectorStore",
    "embeddings": "BlendEmbedding",
    "response_synthesizers": "BlendSynthesizer",
}


class Told(BaseEventHandler):
    reuse: list[BlendReuseEvent] = Field(default_factory=list)
    starts: list[LLMChatStartEvent] = Field(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, BlendReuseEvent):
            self.reuse.append(event)
        if isinstance(event, LLMChatStartEvent):
            self.starts.append(event)


@pytest.fixture
def told() -> Iterator[Told]:
    dispatcher, handler = get_dispatcher(), Told()
    dispatcher.add_event_handler(handler)
    try:
        yield handler
    finally:
        dispatcher.event_handlers.remove(handler)


def test_a_query_tells_what_was_reused(
    llm: BlendLLM, retriever: BlendRetriever, engine: BlendEngine, told: Told
) -> None:
    response = RetrieverQueryEngine.from_args(retriever, llm=llm).query(QUESTION)
    (event,) = told.reuse
    tokens = sum(len(engine.resources.text_ids(n.node.text)) for n in response.source_nodes)
    assert event.reused_tokens >= tokens > 0
    assert event.reused_tokens + event.fresh_tokens == event.prompt_tokens
    assert event.reused_share == event.reused_tokens / event.prompt_tokens
    assert {c["chunk_id"] for c in event.chunks} == {n.node_id for n in response.source_nodes}
    assert event.ttft_s > 0
    assert event.model_name == engine.resources.model_name
    assert event.model_dump(mode="json")["class_name"] == "BlendReuseEvent"


async def test_every_answer_tells_once_in_the_span_of_its_call(llm: BlendLLM, told: Told) -> None:
    asked = [ChatMessage(role="user", content=QUESTION)]
    llm.chat(asked)
    list(llm.stream_chat(asked))
    await llm.achat(asked)
    [r async for r in await llm.astream_chat(asked)]
    assert [event.span_id for event in told.reuse] == [event.span_id for event in told.starts]
    assert len({event.span_id for event in told.reuse}) == 4
    llm.complete(QUESTION)
    list(llm.stream_complete(QUESTION))
    assert len(told.reuse) == 6


def test_notes_say_why_nothing_was_reused(llm: BlendLLM, told: Told) -> None:
    llm.complete(QUESTION)
    (event,) = told.reuse
    assert event.chunks == []
    assert any("no known chunk was recognised" in note for note in event.notes)


@pytest.mark.parametrize(("kind", "name"), NAMESPACES.items())
def test_a_name_is_also_found_where_llamaindex_keeps_its_kind(kind: str, name: str) -> None:
    leaf = importlib.import_module(f"llama_index.{kind}.blendrag")
    assert leaf.__all__ == [name]
    assert getattr(leaf, name) is getattr(package, name)


@pytest.mark.slow
def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import llama_index.llms.blendrag, sys; print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
