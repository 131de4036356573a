"""What the store benchmark stores: chunks of random KV under keys of their own, and a prompt's buffers."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence

import torch

from blendrag.store import KVStore
from blendrag.store.kv import ChunkKV, KVLayout

NAMESPACE = hashlib.sha256(b"blendrag bench store").hexdigest()
#: Room for any workload; the free space of the disk still counts.
DISK_BYTES = 1 << 40


def key_of(number: object) -> str:
    """A key as good as any."""
    return hashlib.sha256(f"chunk {number}".encode()).hexdigest()


def random_chunk(layout: KVLayout, tokens: int, seed: int) -> ChunkKV:
    """KV of normally distributed numbers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [layout.layer_shape(i, tokens) for i in range(len(layout.layers))]
    layers = [torch.randn(s, generator=generator).to(layout.torch_dtype) for s in shapes]
    return ChunkKV(layout, tokens, layers)


class Prompt:
    """Buffers for some chunks side by side, one per layer: ``[2, Hkv, chunks · T, D]``."""

    def __init__(self, chunks: Sequence[ChunkKV]) -> None:
        first = chunks[0]
        self.chunks = chunks
        self.buffers = []
        for layer in first.layers:
            kv, heads, tokens, width = layer.shape
            shape = (kv, heads, tokens * len(chunks), width)
            self.buffers.append(torch.zeros(shape, dtype=layer.dtype))
        self.targets = [list(buffer.split(first.tokens, dim=2)) for buffer in self.buffers]
        """By layer and chunk, views ``[2, Hkv, T, D]``."""

    @property
    def size_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.chunks)

    def clear(self) -> None:
        for buffer in self.buffers:
            buffer.zero_()

    def holds_all(self) -> bool:
        """Whether every layer of every chunk is in place, bit for bit."""
        return all(
            torch.equal(target, chunk.layers[layer])
            for layer, targets in enumerate(self.targets)
            for target, chunk in zip(targets, self.chunks, strict=True)
        )


def stored(store: KVStore, number: object, chunk: ChunkKV) -> bool:
    """Whether a chunk comes back out of a store, bit for bit."""
    reader = store.open(NAMESPACE, key_of(number), chunk.layout, chunk.tokens)
    if reader is None:
        return False
    with contextlib.closing(reader):
        for layer, expected in enumerate(chunk.layers):
            out = torch.zeros_like(expected)
            reader.read_layer(layer, out)
            if not torch.equal(out, expected):
                return False
    return True
