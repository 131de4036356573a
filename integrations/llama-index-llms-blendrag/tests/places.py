"""Documents that tests of the corpus are about, and what of them an engine holds."""

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
    """Chunks whose KV is stored, and the one that the engine checks itself by."""
    return engine.stats().entries
