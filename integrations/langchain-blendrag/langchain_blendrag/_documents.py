"""Between LangChain's documents and the library's entries: ids, filters, embeddings."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from blendrag.errors import InvalidInputError
from blendrag.frameworks.fields import EngineFields

if TYPE_CHECKING:
    from blendrag.engine.library import Entry

#: Which documents may be found: by metadata (a list names several values), or by looking at each.
Filter = Mapping[str, Any] | Callable[[Document], bool]


class CorpusEmbeddings(Embeddings):
    """The corpus's own embedder (``embedder=`` of the engine), as LangChain asks for vectors."""

    def __init__(self, fields: EngineFields) -> None:
        self._fields = fields

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Unit vectors of ``texts``."""
        vectors: list[list[float]] = self._fields.engine.library.embed(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The unit vector of a question."""
        vector: list[float] = self._fields.engine.library.embed_query(text).tolist()
        return vector


def refuse_options(of: str, given: Mapping[str, Any], *expected: str) -> None:
    """Raise :class:`InvalidInputError` for options that nobody would read."""
    if given:
        raise InvalidInputError(
            f"{', '.join(sorted(given))}: not an option of {of}; expected {', '.join(expected)}"
        )


def refuse_text(name: str, given: Any) -> None:
    """Raise :class:`InvalidInputError` for one text, which Python would take for a list of letters."""
    if isinstance(given, str):
        raise InvalidInputError(
            f"{name} is the text {given!r:.40}, expected a list of texts; write [{given!r:.40}]"
        )


def ids_of(documents: Sequence[Document], ids: Sequence[str | None] | None) -> list[str]:
    refuse_text("ids", ids)
    other = next((doc for doc in documents if not isinstance(doc, Document)), None)
    if isinstance(documents, Document) or other is not None:
        found = documents if other is None else other
        raise InvalidInputError(
            f"documents hold a {type(found).__name__}, expected a list of Document; "
            "use add_texts for texts"
        )
    if ids is not None and len(ids) != len(documents):
        raise InvalidInputError(
            f"{len(ids)} ids for {len(documents)} documents, expected as many; or leave ids out"
        )
    given = [doc.id for doc in documents] if ids is None else ids
    return [name or _made_of(doc) for name, doc in zip(given, documents, strict=True)]


def _made_of(document: Document) -> str:
    """An id of its text and metadata: an app that adds its documents at every start adds them once."""
    content = [document.page_content, document.metadata]
    return str(uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(content, sort_keys=True, default=str)))


def to_entry(name: str, document: Document) -> Entry:
    from blendrag.engine.library import Entry

    metadata = document.metadata
    title, start = metadata.get("title"), metadata.get("start_index")
    return Entry(
        id=name,
        text=document.page_content,
        metadata=metadata,
        title=title if isinstance(title, str) else "",
        start=start if isinstance(start, int) else 0,
    )


def to_document(entry: Entry) -> Document:
    return Document(id=entry.id, page_content=entry.text, metadata=dict(entry.metadata))


def where_of(filter: Filter | None) -> Callable[[Entry], bool] | None:
    """``filter`` as the library asks it."""
    if filter is None:
        return None
    if callable(filter):
        return lambda entry: bool(filter(to_document(entry)))
    if not isinstance(filter, Mapping):
        raise InvalidInputError(
            f"filter is a {type(filter).__name__}, expected metadata such as {{'source': 'a.txt'}} or "
            "a function of a document"
        )
    for key, wanted in filter.items():
        if str(key).startswith("$") or isinstance(wanted, Mapping):
            raise InvalidInputError(
                f"filter {key!r}: {wanted!r:.60} has operators, expected a value or a list of values; "
                "give a function of a document for anything else"
            )
    return lambda entry: all(_matches(entry.metadata.get(k), v) for k, v in filter.items())


def _matches(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list | tuple | set) else value == wanted


def embedding_name(embedding: Embeddings | None) -> str:
    """What tells one embedding model from another, for the corpus to remember."""
    if embedding is None:
        return ""
    kind = type(embedding)
    names = (getattr(embedding, name, None) for name in ("model", "model_name", "model_id"))
    model = next((name for name in names if isinstance(name, str)), "")
    return f"{kind.__module__}.{kind.__qualname__}" + (f":{model}" if model else "")
