"""Documents that tests of the vector store and the text splitter are about."""

from __future__ import annotations

from langchain_core.documents import Document

CATS = "The cats of the harbour sleep on the warm stones beside the old fish market."
SHIPS = "The ships that were built here in the year 1874 are still in the harbour."
FOXES = "The quick brown fox jumps over the lazy dog near the bank of the river."
CHANGED = "The ships that were built here in the year 1875 were all of them sold."


def documents(*texts: str, source: str = "") -> list[Document]:
    return [Document(text, metadata={"source": source or text[4:8]}) for text in texts]
