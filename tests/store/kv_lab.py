"""A tiny layout whose layers differ in shape, chunks made from a seed, and what is compared of them."""

from __future__ import annotations

import gc
import hashlib
import os
from pathlib import Path

import numpy as np
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
    def blank(layer: int) -> np.ndarray:
        """Somewhere to read a layer to, made without a torch operator."""
        return np.zeros(Lab.layout.layer_shape(layer, Lab.tokens), dtype=np.float32)

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
