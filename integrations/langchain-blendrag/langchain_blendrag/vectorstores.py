"""``BlendVectorStore``: documents with their vectors and their KV, added and deleted together.

Owns LangChain's interface to the engine's library, where one document is one chunk. LangChain's own
``index(documents, record_manager, vector_store, cleanup=…)`` keeps KV in step with a changing corpus
through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from blendrag.errors import InvalidInputError
from blendrag.frameworks.fields import EngineFields
from langchain_blendrag._documents import (
    embedding_name,
    ids_of,
    refuse_options,
    refuse_text,
    to_document,
    to_entry,
)
from langchain_blendrag._searching import SearchableStore

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine


class BlendVectorStore(SearchableStore):
    """Vectors in FAISS, texts and KV in the blendrag store beside them.

    ``add_documents(ids=…)`` also precomputes the KV, which ``delete`` drops with the last document of
    the same text. Documents are stored as they are, one chunk each: split them before
    (:class:`BlendTextSplitter`).

    Args:
        embedding: LangChain's embeddings to take vectors from; the corpus's own embedder otherwise.
        model, store, dtype, device, embedder, trust_remote_code, engine: as for :class:`ChatBlend`.

    Example:
        ```python
        store = BlendVectorStore(model="Qwen/Qwen2.5-0.5B-Instruct", store="./kv")
        store.add_documents(documents, ids=ids)
        retriever = store.as_retriever(search_kwargs={"k": 6})
        ```
    """

    def __init__(
        self,
        embedding: Embeddings | None = None,
        *,
        model: str | None = None,
        store: Path | str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        embedder: str | None = None,
        trust_remote_code: bool | None = None,
        engine: BlendEngine | None = None,
    ) -> None:
        named: dict[str, Any] = {
            "model": model, "store": store, "dtype": dtype, "device": device,
            "embedder": embedder, "trust_remote_code": trust_remote_code, "engine": engine,
        }  # fmt: skip
        fields = EngineFields(**{k: v for k, v in named.items() if v is not None})
        if isinstance(embedding, str):
            raise InvalidInputError(
                f"embedding is the text {embedding!r:.60}, expected LangChain's Embeddings; name a model "
                "as model=, an embedder as embedder="
            )
        super().__init__(fields, embedding)

    @property
    def engine(self) -> BlendEngine:
        """The engine given, or the shared one of these names. Making it loads no model yet."""
        return self._fields.engine

    # -- keeping --------------------------------------------------------------------------------

    def add_documents(
        self,
        documents: list[Document],
        *,
        ids: Sequence[str | None] | None = None,
        batch_size: int | None = None,
        precompute: bool = True,
        **kwargs: Any,
    ) -> list[str]:
        """Add ``documents``, in place of those that had their ids; the ids.

        Ids are those given, else the documents' own, else made of text and metadata, so that adding
        the same document again changes nothing and costs a look-up. ``batch_size`` documents (all, if
        not given) are there together or not at all. ``precompute=False`` leaves the KV to be computed
        after a prompt first misses it.
        """
        refuse_options("add_documents", kwargs, "ids", "batch_size", "precompute")
        named = ids_of(documents, ids)
        size = batch_size or max(len(documents), 1)
        for start in range(0, len(documents), size):
            batch, names = documents[start : start + size], named[start : start + size]
            entries = [to_entry(name, doc) for name, doc in zip(names, batch, strict=True)]
            self._library.add(
                entries,
                self._vectors_of(batch),
                embedder=embedding_name(self._embedding),
                precompute=precompute,
            )
        return named

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """As :meth:`add_documents`, of texts with their metadata."""
        refuse_text("texts", texts)
        return super().add_texts(texts, metadatas, ids=ids, **kwargs)

    def _vectors_of(self, documents: Sequence[Document]) -> np.ndarray | None:
        if self._embedding is None:
            return None
        texts = [document.page_content for document in documents]
        return np.asarray(self._embedding.embed_documents(texts), np.float32)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Forget documents with their vectors and KV; without ``ids``, all that were added here.

        An id that is not there is no error.
        """
        refuse_text("ids", ids)
        if ids is None:
            self._library.clear()
        else:
            self._library.delete(ids)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Documents of these ids, in their order; those that are not there are left out."""
        refuse_text("ids", ids)
        return [to_document(entry) for entry in self._library.get(ids)]

    # -- making and closing ---------------------------------------------------------------------

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> BlendVectorStore:
        """A vector store of ``kwargs`` (``model``, ``store``, …), with ``texts`` added."""
        made = cls(embedding, **kwargs)
        made.add_texts(texts, metadatas, ids=ids)
        return made

    @classmethod
    def from_documents(
        cls, documents: list[Document], embedding: Embeddings | None = None, **kwargs: Any
    ) -> BlendVectorStore:
        """A vector store of ``kwargs`` (``model``, ``store``, …), with ``documents`` added."""
        ids = kwargs.pop("ids", None)
        made = cls(embedding, **kwargs)
        made.add_documents(documents, ids=ids)
        return made

    def close(self) -> None:
        """Close the shared engine of these names; a given one is closed by who made it."""
        self._fields.close()

    def __enter__(self) -> BlendVectorStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
