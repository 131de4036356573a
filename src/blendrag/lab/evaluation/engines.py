"""The engines of one evaluation: one for each way of encoding chunks, over one loaded model.

Each has a store in a temporary directory, which holds the chunks of one context at a time. KV is read from
disk (no memory tier), so that no way finds it warmer than another. Only idealised prefix caching has its KV
in memory, from the first question on: that of the first chunk, encoded behind the text before it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from enum import Enum
from pathlib import Path

import numpy as np
import torch

from blendrag.config import KVEncoding
from blendrag.corpus.embedder import Embedder
from blendrag.engine import BlendEngine
from blendrag.errors import InvalidInputError
from blendrag.fusor.gate import verdicts, verify
from blendrag.lab.evaluation.ways import PREFIX, Way
from blendrag.model.adapter import ModelAdapter
from blendrag.store.identity import chunk_key
from blendrag.store.tiered import TieredStore
from blendrag.text.chunking import MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS
from blendrag.text.readers import Document

#: Memory limit of idealised prefix caching; it holds one chunk.
IDEAL_RAM_BYTES = 16 * 1024**3


class Stored(Enum):
    """What the chunks of a store are encoded behind."""

    PREFIX = "the corpus's prefix"
    NOTHING = "nothing"
    PROMPT = "the text before them in the prompt"


def _stored(way: Way) -> Stored | None:
    """``None`` for ways that load nothing."""
    if way.policy == PREFIX:
        return Stored.PROMPT
    if way.encode_prefix is None:
        return None
    return Stored.PREFIX if way.encode_prefix else Stored.NOTHING


class _NoEmbedder(Embedder):
    """Zeros: nothing is searched for."""

    def embed(self, texts: Sequence[str], titles: Sequence[str] | None = None) -> np.ndarray:
        return np.zeros((len(texts), 8), np.float32)  # [n, dim]


class Engines:
    """Made by :func:`open_engines`."""

    def __init__(self, engines: Mapping[Stored, BlendEngine]) -> None:
        self._engines = engines
        self._held = dict.fromkeys(engines, 0)

    def of(self, way: Way) -> BlendEngine:
        """The engine that answers this way."""
        stored = _stored(way)
        return next(iter(self._engines.values())) if stored is None else self._engines[stored]

    def hold(self, chunks: Sequence[str]) -> None:
        """Encode ``chunks`` in place of those before.

        Raises :class:`InvalidInputError` for an empty list and for a chunk that is too long.
        """
        texts = [text for text in dict.fromkeys(chunk.strip() for chunk in chunks) if text]
        if not texts:
            raise InvalidInputError(
                "the chunk list is empty, expected at least one text; give every record its contexts"
            )
        for stored, engine in self._engines.items():
            wanted = texts[:1] if stored is Stored.PROMPT else texts
            if held := self._held[stored]:
                engine.remove([f"chunk {number}" for number in range(held)])
            documents = [
                Document(f"chunk {number}", text, "") for number, text in enumerate(wanted)
            ]
            report = engine.ingest(documents).whole()
            if report.chunks != len(wanted):
                raise InvalidInputError(
                    f"{len(wanted)} chunks of a context were cut into {report.chunks}, expected none "
                    f"over {MAX_CHUNK_TOKENS} tokens; split them"
                )
            self._held[stored] = len(wanted)
            if stored is Stored.PROMPT:
                _promote(engine, wanted[0])


def _promote(engine: BlendEngine, chunk: str) -> None:
    """Read the chunk's KV once, which brings it to the memory tier."""
    resources = engine.resources
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


@contextmanager
def open_engines(
    adapter: ModelAdapter,
    ways: Sequence[Way],
    head: str,
    largest_chunk: int,
    kv_encoding: KVEncoding = "native",
) -> Iterator[Engines]:
    """Engines for chunks of at most ``largest_chunk`` tokens; their stores are removed afterwards.

    ``head``: the rendered prompt before its first chunk. Idealised prefix caching keeps native KV.
    """
    kinds = dict.fromkeys(stored for way in ways if (stored := _stored(way)) is not None)
    verification = verify(adapter)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="blendrag-eval-")))
        engines: dict[Stored, BlendEngine] = {}
        for number, stored in enumerate(kinds or (Stored.PREFIX,)):
            is_ideal = stored is Stored.PROMPT
            engine = BlendEngine(
                adapter,
                root / str(number),
                chunk_tokens=min(max(largest_chunk, MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS),
                prefix_text=head if is_ideal else None,
                encode_prefix=stored is not Stored.NOTHING,
                encoding="native" if is_ideal else kv_encoding,
                ram_bytes=IDEAL_RAM_BYTES if is_ideal else 0,
            )
            engine.resources.embedder = _NoEmbedder("none")
            engines[stored] = stack.enter_context(engine)
            _ = engine.resources.store  # makes its directory
            # The gate verifies the model, so once is enough.
            verdicts(root / str(number), adapter.identity.namespace).keep(verification)
        yield Engines(engines)
