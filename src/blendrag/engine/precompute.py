"""Computing the KV of chunks that are about to be added by id.

Owns the note left before anything is stored, and taking back what was stored when a call fails. Does
not know ids, vectors or rows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from blendrag.corpus.corpus import Corpus
from blendrag.engine.encoding import Encoder
from blendrag.engine.orphans import drop_orphaned_kv
from blendrag.engine.resources import Resources
from blendrag.engine.worker import Worker
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.store.base import PinScope
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.identity import chunk_key
from blendrag.text.chunking import Chunk
from blendrag.text.matches import is_recognisable


@dataclass
class Computed:
    """KV that was computed."""

    chunks: int = 0
    tokens: int = 0
    bytes: int = 0


def compute_kv(
    resources: Resources, worker: Worker, corpus: Corpus, chunks: Sequence[Chunk]
) -> Computed:
    """Compute and store the KV of those chunks that have none.

    Chunks too short to be recognised in a prompt get none. What is put is not evicted for what is put
    after it. Raises what :meth:`Library.add` raises; see :func:`take_back`.
    """
    wanted = {c.chunk_id: c for c in chunks if is_recognisable(c.text)}
    if not wanted:
        return Computed()
    encoder = Encoder(resources, worker)
    computed = Computed()
    with resources.store.pin_scope() as scope:
        missing = _missing(resources, encoder, list(wanted.values()), scope)
        if missing:
            corpus.dropped.note(missing, time.time())
            resources.remember_namespace()
        for chunk in missing:
            _compute(resources, encoder, chunk, computed)
    return computed


def take_back(resources: Resources, corpus: Corpus, chunks: Sequence[Chunk]) -> None:
    """Drop the KV of those chunks that were not added after all.

    What keeps it from that, as a full disk may, hides no error that it is called for: the note that
    :func:`compute_kv` left has it dropped later.
    """
    with contextlib.suppress(BlendragError):
        corpus.dropped.note(chunks, 0.0)  # as if they had been removed
        drop_orphaned_kv(resources, corpus)


def _missing(
    resources: Resources, encoder: Encoder, chunks: Sequence[Chunk], scope: PinScope
) -> list[Chunk]:
    missing = []
    for chunk in chunks:
        key = _key(resources, encoder, chunk)
        if resources.store.contains(encoder.namespace, key):
            scope.protect(encoder.namespace, key)
        else:
            missing.append(chunk)
    return missing


def _compute(resources: Resources, encoder: Encoder, chunk: Chunk, computed: Computed) -> None:
    try:
        kv = encoder.encode(resources.text_ids(chunk.text))
        resources.store.put(encoder.namespace, _key(resources, encoder, chunk), kv)
    except InvalidInputError as bad:  # too long for the model, or NaN: name the text
        raise InvalidInputError(f"the text {chunk.text[:40]!r}…: {bad}") from bad
    computed.chunks += 1
    computed.tokens += kv.tokens
    computed.bytes += stored_chunk_bytes(kv.layout, kv.tokens)


def _key(resources: Resources, encoder: Encoder, chunk: Chunk) -> str:
    return chunk_key(encoder.namespace, resources.prefix_ids, resources.text_ids(chunk.text))
