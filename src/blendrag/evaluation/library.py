"""Where the chunks of the context at hand are kept: a store behind the prefix, and one without.

Owns one engine per way of encoding, both over one loaded model, in a temporary directory that goes
with them. Each holds one context at a time, so that a long run needs no more disk than a short one.
KV is read from disk (no memory tier), so that no way finds it warmer than another.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from blendrag.chunking import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from blendrag.model.adapter import ModelAdapter
from blendrag.readers import Document
from blendrag.retriever.embedder import Embedder

#: Of vectors that nothing is searched by.
VECTOR_DIM = 8


class _NoEmbedder(Embedder):
    """Zeros: the chunks of a prompt are given, nothing is searched for."""

    def embed(self, texts: Sequence[str], titles: Sequence[str] | None = None) -> np.ndarray:
        return np.zeros((len(texts), VECTOR_DIM), np.float32)  # [n, dim]


class Library:
    """Engines by whether chunks are encoded behind the prefix; made by :func:`open_library`."""

    def __init__(self, engines: dict[bool, BlendEngine]) -> None:
        self._engines = engines
        self._held: tuple[str, ...] = ()

    def engine(self, encode_prefix: bool | None) -> BlendEngine:
        """``None``: any, for ways that load nothing."""
        if encode_prefix is None:
            return next(iter(self._engines.values()))
        return self._engines[encode_prefix]

    def hold(self, chunks: Sequence[str]) -> None:
        """Encode ``chunks`` and forget those before.

        Raises :class:`InvalidInputError` for an empty chunk list and for a chunk that is cut again.
        """
        if not chunks:
            raise InvalidInputError(
                "the chunk list is empty, expected at least one text; give every record its contexts"
            )
        wanted = tuple(dict.fromkeys(chunk.strip() for chunk in chunks))
        documents = [Document(f"chunk {number}", text, "") for number, text in enumerate(wanted)]
        for engine in self._engines.values():
            if self._held:
                engine.remove([f"chunk {number}" for number in range(len(self._held))])
            report = engine.ingest(documents).whole()
            if report.chunks != len(wanted):
                raise InvalidInputError(
                    f"{len(wanted)} chunks of a context were cut into {report.chunks}; expected "
                    f"none to be empty or over {MAX_CHUNK_TOKENS} tokens, split them"
                )
        self._held = wanted


@contextmanager
def open_library(
    adapter: ModelAdapter, encode_prefix: Sequence[bool], largest_chunk: int
) -> Iterator[Library]:
    """A library for chunks of at most ``largest_chunk`` tokens, removed afterwards."""
    chunk_tokens = min(max(largest_chunk, MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS)
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="blendrag-eval-"))
        engines = {}
        for prefix in encode_prefix or (True,):
            engine = BlendEngine(
                adapter,
                Path(root) / f"prefix-{prefix}",
                chunk_tokens=chunk_tokens,
                encode_prefix=prefix,
                ram_bytes=0,
            )
            engine.resources.embedder = _NoEmbedder("none")
            engines[prefix] = stack.enter_context(engine)
        yield Library(engines)
