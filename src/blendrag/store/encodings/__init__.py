"""How a layer's KV is stored: as it was computed, or as one byte a number beside scales.

``base`` holds the parts of a stored layer and what they cost, ``int8`` and ``fp8`` a codec each.
Nothing here loads torch but :func:`codec_of` where there is something to encode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blendrag.store.encodings.base import (
    ENCODINGS,
    RELATIVE_ERROR,
    Part,
    stored_chunk_bytes,
    stored_layer_bytes,
    stored_parts,
)
from blendrag.store.kv import KVLayout

if TYPE_CHECKING:
    from blendrag.store.encodings.codec import Codec, Staging

__all__ = [
    "ENCODINGS",
    "RELATIVE_ERROR",
    "Part",
    "codec_of",
    "staging_of",
    "stored_chunk_bytes",
    "stored_layer_bytes",
    "stored_parts",
]


def codec_of(layout: KVLayout) -> Codec | None:
    """What turns this layout's layers into stored bytes and back; ``None`` where they are the same."""
    if layout.encoding == "int8":
        from blendrag.store.encodings.int8 import Int8

        return Int8(layout)
    if layout.encoding == "fp8":
        from blendrag.store.encodings.fp8 import Fp8

        return Fp8(layout)
    return None


def staging_of(layout: KVLayout, tokens: int) -> Staging | None:
    """Where the layers of one chunk are decoded from; ``None`` where there is nothing to decode."""
    codec = codec_of(layout)
    if codec is None:
        return None
    from blendrag.store.encodings.codec import Staging

    return Staging(codec, tokens)
