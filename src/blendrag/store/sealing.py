"""The payload that a KV becomes: checked, encoded and summed up, in memory.

Knows the form of a payload (:mod:`format`) and of a layer (:mod:`encodings`); writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from blendrag.errors import InvalidInputError
from blendrag.store.encodings import codec_of
from blendrag.store.format import frame, layer_checksum
from blendrag.store.kv import ChunkKV
from blendrag.store.raw import all_finite, on_cpu, tensor_buffer


@dataclass(frozen=True)
class Sealed:
    """A payload yet to be written."""

    buffers: list[Any]
    """The header, then the layers."""
    size_bytes: int
    layers: list[torch.Tensor]
    """What the buffers are of, and live no longer than."""


def sealed(namespace: str, key: str, kv: ChunkKV) -> Sealed:
    """The payload of a key. Raises :class:`InvalidInputError` for NaN and infinity."""
    expected = frame(kv.layout, kv.tokens)
    codec = codec_of(kv.layout)
    layers, checksums = [], []
    for i, tensor in enumerate(kv.layers):  # one after the other, while it is in the cache
        layer = on_cpu(tensor)
        _check_finite(layer, i, kv.layout.dtype, key)
        layers.append(codec.encode(i, layer) if codec else layer)
        checksums.append(layer_checksum(key, i, tensor_buffer(layers[i])))
    header = expected.header(namespace, key, checksums)
    return Sealed([header, *map(tensor_buffer, layers)], expected.file_bytes, layers)


def _check_finite(layer: torch.Tensor, number: int, dtype: str, key: str) -> None:
    if not all_finite(layer, dtype):
        raise InvalidInputError(
            f"KV {key[:12]}… has NaN or infinity in layer {number}, expected finite numbers; "
            "compute it in bfloat16 or float32, or leave this chunk out"
        )
