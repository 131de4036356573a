"""Documents about places for tests, and what an engine holds of them."""

from __future__ import annotations

from typing import Any

from llama_index.core.schema import Document

from blendrag.engine import BlendEngine


def text_about(place: str) -> str:
    return " ".join(
        f"The company of {place} built {n} ships near the old town by the sea." for n in range(12)
    )


def document(place: str, text: str | None = None, **metadata: Any) -> Document:
    return Document(text=text or text_about(place), doc_id=place, metadata=metadata)


def entries_of(engine: BlendEngine, place: str) -> list[str]:
    return [entry.id for entry in engine.library.entries(parent=place)]


def keys(engine: BlendEngine) -> int:
    """Stored chunks, including the one of the engine's self-check."""
    return engine.stats().entries
