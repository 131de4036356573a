"""Texts, a tool and a schema for tests, and helpers that read what was streamed and sent."""

from __future__ import annotations

from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from pydantic import BaseModel

from blendrag.engine import BlendEngine

CATS = "The cats of the harbour sleep on the warm stones beside the old fish market."
SHIPS = "The ships that were built here in the year 1874 are still in the harbour."
FOXES = "The quick brown fox jumps over the lazy dog near the bank of the river."
CHANGED = "The ships that were built here in the year 1875 were all of them sold."


def documents(*texts: str, source: str = "") -> list[Document]:
    return [Document(text, metadata={"source": source or text[4:8]}) for text in texts]


@tool
def get_weather(location: str) -> str:
    """The weather."""
    return f"sunny in {location}"


class Joke(BaseModel):
    """A joke."""

    setup: str
    punchline: str


def whole(chunks: Any) -> AIMessageChunk:
    """The sum of all chunks."""
    full = None
    for chunk in chunks:
        full = chunk if full is None else full + chunk
    assert isinstance(full, AIMessageChunk)
    return full


def last_prompt(engine: BlendEngine) -> str:
    """The last prompt of the scripted model."""
    return str(engine.adapter.model.prompts[-1])
