"""A prompt of two chunks between fresh tokens, for tests of the fusor and of policies."""

from __future__ import annotations

import tiny
from blendrag.fusor.loader import LoadedSpan
from blendrag.model import ModelAdapter

N = 150
LAYERS = 4
IDS = tiny.random_ids(N)
#: fresh 0-10, chunk 10-70, fresh 70-74, chunk 74-130, fresh 130-150
CHUNKS = ((10, 70), (74, 130))
CANDIDATES = sum(b - a for a, b in CHUNKS)
FRESH = N - CANDIDATES


def exact_spans(adapter: ModelAdapter, noise: float = 0.0) -> list[LoadedSpan]:
    """KV of the chunks in their true context, stored at position 1; ``noise`` makes it useless."""
    return [tiny.span(adapter, IDS, a, b, stored_at=1, noise=noise) for a, b in CHUNKS]
