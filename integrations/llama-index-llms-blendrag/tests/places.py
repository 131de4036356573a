"""Documents about places for tests."""

from __future__ import annotations

from typing import Any

from llama_index.core.schema import Document


def text_about(place: str, sentences: int = 6) -> str:
    return " ".join(
        f"The company of {place} built {n} ships near the old town by the sea."
        for n in range(sentences)
    )


def document(place: str, text: str | None = None, **metadata: Any) -> Document:
    return Document(text=text or text_about(place), doc_id=place, metadata=metadata)
