"""``BlendNodeParser``: splits documents into nodes of one chunk each, as ``blendrag ingest`` does."""

from __future__ import annotations

from typing import Any

from llama_index.core.node_parser.interface import MetadataAwareTextSplitter

from blendrag.errors import InvalidInputError
from blendrag.frameworks.fields import CONFIG, EngineFields
from blendrag.text.chunking import MIN_CHUNK_TOKENS, Chunker


class BlendNodeParser(EngineFields, MetadataAwareTextSplitter):
    """Splits into pieces of at most ``chunk_tokens`` tokens of the *model's* tokenizer.

    :class:`BlendLLM` recognises every piece in prompts. Pieces are exact substrings of their document; one
    that begins inside a table has the table's header before it, and no ``start_char_idx``. Does not load the
    model's weights.

    Example:
        ```python
        nodes = BlendNodeParser(model="Qwen/Qwen2.5-0.5B-Instruct", store="./kv")(documents)
        ```

    Calls raise :class:`InvalidInputError` for a limit out of range and for metadata that leaves too few
    tokens.
    """

    model_config = CONFIG

    chunk_tokens: int | None = None
    """``None`` takes the limit of the corpus, else of the engine's settings."""
    count_metadata: bool = True
    """Whether the metadata that LlamaIndex writes before a text counts against the limit. KV is stored
    for the text only; with ``False``, chunks do not change with their metadata."""

    @classmethod
    def class_name(cls) -> str:
        return "BlendNodeParser"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Like LlamaIndex, with limit and tokenizer, so that a pipeline's cache depends on them."""
        described = super().to_dict(**kwargs) | {"chunk_tokens": self._limit()}
        if self.given_engine is not None:
            described["engine"] = f"BlendEngine, tokenizer {self.engine.tokens.fingerprint}"
        return described

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> BlendNodeParser:
        """Like LlamaIndex; pass a custom ``id_func=`` again."""
        # LlamaIndex writes the function's name, which it cannot read again
        return super().from_dict({k: v for k, v in data.items() if k != "id_func"}, **kwargs)

    def split_text(self, text: str) -> list[str]:
        return self._split(text, self._limit())

    def split_text_metadata_aware(self, text: str, metadata_str: str) -> list[str]:
        """Pieces that fit the limit together with ``metadata_str``."""
        limit = self._limit()
        if not (self.count_metadata and metadata_str):
            return self._split(text, limit)
        # as LlamaIndex's text_template joins them
        used = len(self.engine.tokens.encode_text(f"{metadata_str}\n\n"))
        if limit - used < MIN_CHUNK_TOKENS:
            raise InvalidInputError(
                f"metadata takes {used} of a chunk's {limit} tokens, expected it to leave "
                f"{MIN_CHUNK_TOKENS}; exclude keys from it, raise chunk_tokens or set "
                "count_metadata=False"
            )
        return self._split(text, limit - used)

    def _split(self, text: str, limit: int) -> list[str]:
        chunker = Chunker(self.engine.tokens.text, limit)
        return [chunk.text for chunk in chunker.split(text)]

    def _limit(self) -> int:
        if self.chunk_tokens is None:
            return self.engine.manifest.chunk_tokens
        return self.chunk_tokens
