"""Wrappers over shared engines, and a record of LlamaIndex's instrumentation events."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TypeVar

import pytest
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent

from blendrag.engine import BlendEngine
from llama_index.llms.blendrag import BlendLLM, BlendRetriever

#: This directory, and the models of blendrag's own tests.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from llm_standard_tests import Events, events

from paragraphs import _changing, empty, engine, own, root

__all__ = ["_changing", "empty", "engine", "events", "own", "root"]

T = TypeVar("T")


class Seen:
    """Events of LLM calls."""

    def __init__(self, events: Events) -> None:
        self.events = events

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events.seen if isinstance(event, kind)]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each answer."""
        ends = self.of(LLMChatEndEvent)
        return [end.response.raw["blendrag"] for end in ends if end.response is not None]


@pytest.fixture
def seen(events: Events) -> Seen:
    return Seen(events)


@pytest.fixture
def llm(engine: BlendEngine) -> BlendLLM:
    return BlendLLM(engine=engine)


@pytest.fixture
def retriever(engine: BlendEngine) -> BlendRetriever:
    return BlendRetriever(engine=engine, similarity_top_k=4)
