"""A tiny layout with layers of different shapes, chunks from a seed, and comparisons."""

from __future__ import annotations

import gc
import hashlib
import os
from pathlib import Path

import torch

from blendrag.store import DiskStore
from blendrag.store.kv import DTYPES, ChunkKV, KVLayout, LayerShape
from blendrag.store.payload import frame

TOKENS = 24


class Lab:
    """What a store test needs: names, chunks, and a comparison that reads every layer."""

    layout = KVLayout((LayerShape(2, 8), LayerShape(2, 8), LayerShape(1, 16)), "float32")
    tokens = TOKENS
    namespace = hashlib.sha256(b"namespace").hexdigest()
    entry_bytes = frame(layout, TOKENS).file_bytes

    @staticmethod
    def key(number: object) -> str:
        return hashlib.sha256(str(number).encode()).hexdigest()

    @staticmethod
    def kv(seed: int, layout: KVLayout | None = None, tokens: int = TOKENS) -> ChunkKV:
        layout = layout or Lab.layout
        generator = torch.Generator().manual_seed(seed)
        layers = [
            torch.randn(layout.layer_shape(i, tokens), generator=generator).to(DTYPES[layout.dtype])
            for i in range(len(layout.layers))
        ]
        return ChunkKV(layout, tokens, layers)

    @staticmethod
    def put(store, number: int) -> None:
        store.put(Lab.namespace, Lab.key(number), Lab.kv(number))

    @staticmethod
    def open(store, number: int):
        return store.open(Lab.namespace, Lab.key(number), Lab.layout, Lab.tokens)

    @staticmethod
    def has(store, number: int) -> bool:
        return store.contains(Lab.namespace, Lab.key(number))

    @staticmethod
    def read(reader, layout: KVLayout | None = None, tokens: int = TOKENS) -> list[torch.Tensor]:
        layout = layout or Lab.layout
        layers = []
        for i in range(len(layout.layers)):
            out = torch.full(layout.layer_shape(i, tokens), 7.0, dtype=layout.torch_dtype)
            reader.read_layer(i, out)
            layers.append(out)
        return layers

    @staticmethod
    def is_right(store, number: int) -> bool:
        """Whether the entry is there and bit-exact in every layer."""
        reader = Lab.open(store, number)
        if reader is None:
            return False
        read = Lab.read(reader)
        reader.close()
        return all(map(torch.equal, read, Lab.kv(number).layers))

    @staticmethod
    def is_right_in_fork(store, number: int, kv: ChunkKV) -> bool:
        """:meth:`is_right` without torch operators, which a forked child must not run."""
        reader = Lab.open(store, number)
        return reader is not None and Lab.gives(reader, kv)

    @staticmethod
    def gives(reader, kv: ChunkKV) -> bool:
        """Whether a reader gives exactly these bytes; closes it."""
        for layer, expected in enumerate(kv.layers):
            out = torch.from_numpy(expected.numpy() * 0)
            reader.read_layer(layer, out)
            if out.numpy().tobytes() != expected.numpy().tobytes():
                return False
        reader.close()
        return True

    @staticmethod
    def file(store: DiskStore, number: int) -> Path:
        (path,) = (store.root / "kv").rglob(f"{Lab.key(number)}.*.kv")
        return path

    @staticmethod
    def descriptors() -> int:
        """Open descriptors, those of forgotten objects excluded."""
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    @staticmethod
    def payloads(root: Path) -> list[Path]:
        return sorted((root / "kv").rglob("*.kv"))

    @staticmethod
    def fill(root: Path, numbers=range(5), pinned=(), limit_bytes: int = 1 << 30) -> Path:
        """A closed store with these chunks."""
        store = DiskStore(root, limit_bytes)
        for number in numbers:
            Lab.put(store, number)
        for number in pinned:
            store.pin(Lab.namespace, Lab.key(number))
        store.close()
        return root

    @staticmethod
    def intact(root: Path, numbers=range(10)) -> list[int]:
        """Those of the chunks that a closed store has, bit-exact."""
        store = DiskStore(root, None)
        try:
            assert store.stats().entries == len(Lab.payloads(root))
            return [number for number in numbers if Lab.is_right(store, number)]
        finally:
            store.close()

    @staticmethod
    def payload(root: Path, number: int) -> Path:
        """The file of a chunk in a closed store."""
        (path,) = (root / "kv").rglob(f"{Lab.key(number)}.*.kv")
        return path
