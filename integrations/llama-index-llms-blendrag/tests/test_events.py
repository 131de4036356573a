"""``BlendReuseEvent``, and the namespaces from which classes can be imported."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine

from blendrag.engine import BlendEngine
from llama_index.llms import blendrag as package
from llama_index.llms.blendrag import BlendLLM, BlendRetriever

QUESTION = "What does document 3 say about the town of Place32?"
NAMESPACES = {
    "retrievers": "BlendRetriever",
    "node_parser": "BlendNodeParser",
    "vector_stores": "BlendVectorStore",
    "embeddings": "BlendEmbedding",
    "response_synthesizers": "BlendSynthesizer",
}


def test_a_query_emits_what_was_reused(
    llm: BlendLLM, retriever: BlendRetriever, engine: BlendEngine, seen: Any
) -> None:
    response = RetrieverQueryEngine.from_args(retriever, llm=llm).query(QUESTION)
    (event,) = seen.reuse
    tokens = sum(len(engine.resources.text_ids(n.node.text)) for n in response.source_nodes)
    assert event.reused_tokens >= tokens > 0
    assert event.reused_tokens + event.fresh_tokens == event.prompt_tokens
    assert event.reused_share == event.reused_tokens / event.prompt_tokens
    assert {c["chunk_id"] for c in event.chunks} == {n.node_id for n in response.source_nodes}
    assert event.ttft_s > 0
    assert event.model_name == engine.resources.model_name
    assert event.model_dump(mode="json")["class_name"] == "BlendReuseEvent"


async def test_every_answer_emits_one_event_in_the_span_of_its_call(
    llm: BlendLLM, seen: Any
) -> None:
    messages = [ChatMessage(role="user", content=QUESTION)]
    llm.chat(messages)
    list(llm.stream_chat(messages))
    await llm.achat(messages)
    [r async for r in await llm.astream_chat(messages)]
    assert [event.span_id for event in seen.reuse] == [event.span_id for event in seen.starts]
    assert len({event.span_id for event in seen.reuse}) == 4
    llm.complete(QUESTION)
    list(llm.stream_complete(QUESTION))
    assert len(seen.reuse) == 6


@pytest.mark.parametrize(("kind", "name"), NAMESPACES.items())
def test_a_class_can_be_imported_from_the_namespace_of_its_kind(kind: str, name: str) -> None:
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
