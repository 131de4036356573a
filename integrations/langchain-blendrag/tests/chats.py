"""What tests of ``ChatBlend`` share: a tool, a schema, and looking at what was streamed and sent."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from pydantic import BaseModel

from blendrag.engine import BlendEngine


@tool
def get_weather(location: str) -> str:
    """The weather."""
    return f"sunny in {location}"


class Joke(BaseModel):
    """A joke."""

    setup: str
    punchline: str


def whole(chunks: Any) -> AIMessageChunk:
    """All chunks added up."""
    full = None
    for chunk in chunks:
        full = chunk if full is None else full + chunk
    assert isinstance(full, AIMessageChunk)
    return full


def seen_by(engine: BlendEngine) -> str:
    """The prompt that the scripted model was given last."""
    return str(engine.adapter.model.prompts[-1])
