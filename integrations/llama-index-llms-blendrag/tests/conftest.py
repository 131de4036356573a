"""An engine over five documents, and a record of LlamaIndex's instrumentation events."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent
from pydantic import Field
from transformers import PreTrainedTokenizerFast

from blendrag.engine import BlendEngine
from llama_index.llms.blendrag import BlendLLM, BlendRetriever, BlendReuseEvent

#: This directory, and the models of blendrag's own tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import paragraphs


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return paragraphs.tokenizer()


@pytest.fixture(scope="session")
def engine(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BlendEngine]:
    with paragraphs.engine(tokenizer, tmp_path_factory.mktemp("blendrag")) as engine:
        yield engine


class Seen(BaseEventHandler):
    """Records events of LLM calls."""

    prompts: list[list[ChatMessage]] = Field(default_factory=list)
    starts: list[LLMChatStartEvent] = Field(default_factory=list)
    reuse: list[BlendReuseEvent] = Field(default_factory=list)
    raws: list[dict[str, Any]] = Field(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, LLMChatStartEvent):
            self.starts.append(event)
            self.prompts.append(event.messages)
        if isinstance(event, BlendReuseEvent):
            self.reuse.append(event)
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            self.raws.append(event.response.raw)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each answer so far."""
        return [raw["blendrag"] for raw in self.raws]


@pytest.fixture
def seen() -> Iterator[Seen]:
    handler = Seen()
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(handler)
    try:
        yield handler
    finally:
        dispatcher.event_handlers.remove(handler)


@pytest.fixture
def llm(engine: BlendEngine) -> BlendLLM:
    return BlendLLM(engine=engine)


@pytest.fixture
def retriever(engine: BlendEngine) -> BlendRetriever:
    return BlendRetriever(engine=engine, similarity_top_k=4)
