"""``BlendTextSplitter``: splits documents into chunks as ``blendrag ingest`` does."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Unpack

from langchain_core.documents import Document
from langchain_text_splitters import TextSplitter

from blendrag.config import OPTIONS
from blendrag.errors import InvalidInputError
from blendrag.frameworks.engines import EngineArguments
from blendrag.frameworks.fields import EngineFields, check_keywords
from blendrag.signatures import shows
from langchain_blendrag.vectorstores import refuse_text


class BlendTextSplitter(TextSplitter):
    """Splits at paragraphs, then sentences, then words, within ``chunk_size`` tokens.

    Tokens are those of the model's own tokenizer, and a prompt that quotes a piece is recognised. Pieces are
    exact substrings; one that begins inside a table has the table's header before it.

    Args:
        chunk_size: largest number of tokens of a piece; default: the corpus's limit (512 for a new one).
        chunk_overlap: 0. Overlapping pieces would be stored and computed twice.
        add_start_index: whether ``metadata["start_index"]`` says where a piece begins.
        names: ``model``, ``store``, …, or ``engine``, as for :class:`ChatBlend`; only the tokenizer is
            loaded, when first needed.

    Example:
        ```python
        BlendTextSplitter(model="Qwen/Qwen2.5-0.5B-Instruct", store="./kv").split_documents(documents)
        ```

    Raises :class:`InvalidInputError` for a size outside [64, 4096] or an overlap.
    """

    @shows(EngineArguments)
    def __init__(
        self,
        *,
        chunk_size: int | None = None,
        chunk_overlap: int = 0,
        add_start_index: bool = False,
        **names: Unpack[EngineArguments],
    ) -> None:
        from blendrag.text.chunking import MAX_CHUNK_TOKENS

        check_keywords(BlendTextSplitter, names)
        if chunk_overlap != 0:
            raise InvalidInputError(
                f"chunk_overlap is {chunk_overlap!r}, expected 0, as overlapping pieces are stored and "
                "computed twice; leave it out"
            )
        OPTIONS["chunk_tokens"].check(chunk_size, "chunk_size")
        self._fields = EngineFields(**names)
        self._chunk_tokens = chunk_size
        super().__init__(
            chunk_size=chunk_size or MAX_CHUNK_TOKENS,
            chunk_overlap=0,
            length_function=self.count_tokens,
            add_start_index=add_start_index,
        )

    def split_text(self, text: str) -> list[str]:
        """Pieces of ``text`` in order, without surrounding white space."""
        return [chunk.text for chunk in self._chunker().split(text)]

    def create_documents(
        self, texts: list[str], metadatas: list[dict[Any, Any]] | None = None
    ) -> list[Document]:
        """Like LangChain, but refuses a single text instead of a list."""
        refuse_text("texts", texts)
        if not self._add_start_index:
            return super().create_documents(texts, metadatas)
        return [  # LangChain searches for each piece, and finds none that repeats a header
            Document(chunk.text, metadata={**deepcopy(metadata), "start_index": chunk.start})
            for text, metadata in zip(texts, metadatas or [{}] * len(texts), strict=False)
            for chunk in self._chunker().split(text)
        ]

    def count_tokens(self, text: str) -> int:
        """Tokens of ``text`` by the model's tokenizer, without special tokens."""
        return self._chunker().count(text)

    def _chunker(self) -> Any:
        from blendrag.text.chunking import Chunker

        engine = self._fields.engine
        return Chunker(engine.tokens.text, self._chunk_tokens or engine.manifest.chunk_tokens)
