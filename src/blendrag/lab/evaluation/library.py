"""Where the chunks of the context at hand are kept: by what they were encoded behind.

Owns one engine per kind of store, all over one loaded model, in a temporary directory that goes with
them. Each holds one context at a time, so that a long run needs no more disk than a short one. KV is
read from disk (no memory tier), so that no way finds it warmer than another; only idealised prefix
caching has it in memory, from the first question on, and of the first chunk alone, encoded behind the
very text that stands before it in every prompt.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import torch

from blendrag.config import KVEncoding
from blendrag.corpus.embedder import Embedder
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from blendrag.fusor.gate import remember, verify
from blendrag.lab.evaluation.ways import PREFIX, Way
from blendrag.model.adapter import ModelAdapter
from blendrag.store.identity import chunk_key
from blendrag.store.tiered import TieredStore
from blendrag.text.chunking import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS
from blendrag.text.readers import Document

#: Of vectors that nothing is searched by.
VECTOR_DIM = 8
#: Limit of the memory that stands for an ideal cache, whatever the settings say; one chunk is in it.
IDEAL_RAM_BYTES = 16 * 1024**3


class _NoEmbedder(Embedder):
    """Zeros: the chunks of a prompt are given, nothing is searched for."""

    def embed(self, texts: Sequence[str], titles: Sequence[str] | None = None) -> np.ndarray:
        return np.zeros((len(texts), VECTOR_DIM), np.float32)  # [n, dim]


class Shelf:
    """One engine, and in its store the chunks of one context."""

    def __init__(self, engine: BlendEngine, first_only: bool = False) -> None:
        self.engine = engine
        self._first_only = first_only
        self._held = 0

    def hold(self, chunks: Sequence[str]) -> None:
        """Encode ``chunks``, different and not empty, and forget those before.

        Raises :class:`InvalidInputError` for a chunk that is cut again.
        """
        wanted = chunks[:1] if self._first_only else chunks
        if self._held:
            self.engine.remove([f"chunk {number}" for number in range(self._held)])
        documents = [Document(f"chunk {number}", text, "") for number, text in enumerate(wanted)]
        report = self.engine.ingest(documents).whole()
        if report.chunks != len(wanted):
            raise InvalidInputError(
                f"{len(wanted)} chunks of a context were cut into {report.chunks}, expected none over "
                f"{MAX_CHUNK_TOKENS} tokens; split them"
            )
        self._held = len(wanted)
        if self._first_only:
            self._promote(wanted[0])

    def _promote(self, chunk: str) -> None:
        """Into the memory tier, which takes what was read once, and not as it is stored."""
        resources = self.engine.resources
        ids, layout = resources.text_ids(chunk), resources.adapter.layout
        namespace = resources.adapter.identity.namespace
        key = chunk_key(namespace, resources.prefix_ids, ids)
        reader = resources.store.open(namespace, key, layout, len(ids))
        if reader is not None:
            with closing(reader):
                shape = layout.layer_shape(0, len(ids))
                reader.read_layer(0, torch.empty(shape, dtype=layout.torch_dtype))
        if isinstance(resources.store, TieredStore):
            resources.store.drain()


class Library:
    """Engines by way; made by :func:`open_library`."""

    def __init__(self, shelves: Mapping[bool | str, Shelf]) -> None:
        self._shelves = shelves

    def engine(self, way: Way) -> BlendEngine:
        """That answers this way."""
        kind = _shelf_of(way)
        shelf = next(iter(self._shelves.values())) if kind is None else self._shelves[kind]
        return shelf.engine

    def hold(self, chunks: Sequence[str]) -> None:
        """Encode ``chunks`` and forget those before.

        Raises :class:`InvalidInputError` for an empty chunk list and for a chunk that is cut again.
        """
        wanted = [text for text in dict.fromkeys(chunk.strip() for chunk in chunks) if text]
        if not wanted:
            raise InvalidInputError(
                "the chunk list is empty, expected at least one text; give every record its contexts"
            )
        for shelf in self._shelves.values():
            shelf.hold(wanted)


def _shelf_of(way: Way) -> bool | str | None:
    """``None``: any, for ways that load nothing."""
    return PREFIX if way.policy == PREFIX else way.encode_prefix


@contextmanager
def open_library(
    adapter: ModelAdapter,
    ways: Sequence[Way],
    head: str,
    largest_chunk: int,
    kv_encoding: KVEncoding = "native",
) -> Iterator[Library]:
    """A library for chunks of at most ``largest_chunk`` tokens, removed afterwards.

    ``head``: the rendered prompt up to its first chunk. An ideal prefix cache keeps its KV native.
    """
    kinds = dict.fromkeys(kind for way in ways if (kind := _shelf_of(way)) is not None)
    verification = verify(adapter)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="blendrag-eval-")))
        shelves: dict[bool | str, Shelf] = {}
        for number, kind in enumerate(kinds or (True,)):
            engine = BlendEngine(
                adapter,
                root / str(number),
                chunk_tokens=min(max(largest_chunk, MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS),
                prefix_text=head if kind == PREFIX else None,
                encode_prefix=bool(kind),
                encoding="native" if kind == PREFIX else kv_encoding,
                ram_bytes=IDEAL_RAM_BYTES if kind == PREFIX else 0,
            )
            engine.resources.embedder = _NoEmbedder("none")
            shelves[kind] = Shelf(stack.enter_context(engine), first_only=kind == PREFIX)
            _ = engine.resources.store  # makes its directory
            # One gate for all of them: it is the model that is verified.
            remember(root / str(number), adapter.identity.namespace, adapter.device, verification)
        yield Library(shelves)
