"""An engine over five documents, and a record of LlamaIndex's instrumentation events."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent
from pydantic import Field

from blendrag.engine import BlendEngine
from llama_index.llms.blendrag import BlendLLM, BlendRetriever, BlendReuseEvent

#: This directory, and the models of blendrag's own tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import paragraphs
import tiny


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with paragraphs.engine(tmp_path_factory.mktemp("blendrag")) as engine:
        yield engine


@pytest.fixture(scope="session")
def _changing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path_factory.mktemp("kv"), chunk_tokens=64) as engine:
        yield engine


@pytest.fixture
def empty(_changing: BlendEngine) -> Iterator[BlendEngine]:
    """An engine over an empty corpus, emptied again afterwards."""
    yield _changing
    _changing.library.clear()


class Seen(BaseEventHandler):
    """Records events of LLM calls."""

    starts: list[LLMChatStartEvent] = Field(default_factory=list)
    reuse: list[BlendReuseEvent] = Field(default_factory=list)
    metrics: list[dict[str, Any]] = Field(default_factory=list)
    """Of each answer."""

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, LLMChatStartEvent):
            self.starts.append(event)
        if isinstance(event, BlendReuseEvent):
            self.reuse.append(event)
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            self.metrics.append(event.response.raw["blendrag"])


@pytest.fixture
def seen() -> Iterator[Seen]:
    handler, handlers = Seen(), get_dispatcher().event_handlers
    handlers.append(handler)
    yield handler
    handlers.remove(handler)


@pytest.fixture
def llm(engine: BlendEngine) -> BlendLLM:
    return BlendLLM(engine=engine)


@pytest.fixture
def retriever(engine: BlendEngine) -> BlendRetriever:
    return BlendRetriever(engine=engine, similarity_top_k=4)
