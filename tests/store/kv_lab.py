"""A tiny layout with layers of different shapes, chunks from a seed, and comparisons."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
from pathlib import Path

import torch

from blendrag.store.disk import DiskStore
from blendrag.store.kv import ChunkKV, KVLayout, LayerShape
from blendrag.store.payload import frame
from blendrag.store.remote.tier import RemoteTier
from blendrag.store.tiered import KVStore

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
    def kv(seed: int, layout: KVLayout = layout, tokens: int = TOKENS) -> ChunkKV:
        generator = torch.Generator().manual_seed(seed)
        shapes = [layout.layer_shape(i, tokens) for i in range(len(layout.layers))]
        layers = [torch.randn(s, generator=generator).to(layout.torch_dtype) for s in shapes]
        return ChunkKV(layout, tokens, layers)

    @staticmethod
    def put(store, number: int, layout: KVLayout = layout, tokens: int = TOKENS) -> ChunkKV:
        kv = Lab.kv(number, layout, tokens)
        store.put(Lab.namespace, Lab.key(number), kv)
        return kv

    @staticmethod
    def open(store, number: int, layout: KVLayout = layout, tokens: int = TOKENS):
        return store.open(Lab.namespace, Lab.key(number), layout, tokens)

    @staticmethod
    def agree(store):
        """``store``, as if the probe of its remote had been compared."""
        store._shared.agreement._agreed.add(Lab.namespace)
        return store

    @staticmethod
    def has(store, number: int) -> bool:
        """Whether a store, or one of its tiers, has that entry durably."""
        namespace, key = Lab.namespace, Lab.key(number)
        if isinstance(store, KVStore):
            return key in store.where(namespace, [key], durable=True)
        if isinstance(store, RemoteTier):
            return key in store.found(namespace, [key], durable=True)
        return store.contains(namespace, key)

    @staticmethod
    def read(reader, layout: KVLayout = layout, tokens: int = TOKENS) -> list[torch.Tensor]:
        layers = []
        for i in range(len(layout.layers)):
            out = torch.full(layout.layer_shape(i, tokens), 7.0, dtype=layout.torch_dtype)
            reader.read_layer(i, out)
            layers.append(out)
        return layers

    @staticmethod
    def read_into_prompt(reader, layout: KVLayout, tokens: int = TOKENS) -> list[torch.Tensor]:
        """The layers, read into the middle of a prompt in which nothing else may change."""
        layers = []
        for i, shape in enumerate(layout.layers):
            prompt = torch.full(shape.tensor_shape(tokens + 20), 7.0, dtype=layout.torch_dtype)
            layers.append(prompt[:, :, 11 : 11 + tokens])
            reader.read_layer(i, layers[-1])
            assert (prompt[:, :, :11] == 7).all()
            assert (prompt[:, :, 11 + tokens :] == 7).all()
        return layers

    @staticmethod
    def is_right(store, number: int, kv: ChunkKV | None = None) -> bool:
        """Whether the entry is there and bit-exact in every layer.

        With ``kv`` it runs no torch operator, which a forked child must not do.
        """
        reader = Lab.open(store, number)
        return reader is not None and Lab.gives(reader, kv or Lab.kv(number))

    @staticmethod
    def right(store, numbers=range(10)) -> list[int]:
        """Those of the chunks that an open store has, bit-exact."""
        return [number for number in numbers if Lab.is_right(store, number)]

    @staticmethod
    def gives(reader, kv: ChunkKV) -> bool:
        """Whether a reader gives exactly these bytes; closes it."""
        with contextlib.closing(reader):
            for layer, expected in enumerate(kv.layers):
                out = torch.from_numpy(expected.numpy() * 0)
                reader.read_layer(layer, out)
                if out.numpy().tobytes() != expected.numpy().tobytes():
                    return False
        return True

    @staticmethod
    def file(where: DiskStore | Path, number: int) -> Path:
        """The file of a chunk in a store."""
        root = where.root if isinstance(where, DiskStore) else where
        (path,) = (root / "kv").rglob(f"{Lab.key(number)}.*.kv")
        return path

    @staticmethod
    def flip(path: Path, offset: int = 5000) -> None:
        """Flip a bit of a file."""
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)

    @staticmethod
    def drop_index(root: Path) -> None:
        for path in (root / "index").glob("index.db*"):
            path.unlink()

    @staticmethod
    def descriptors() -> int:
        """Files and directories that are open, those of forgotten objects excluded."""
        gc.collect()
        names: list[str] = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the list itself
                names.append(os.readlink(f"/proc/self/fd/{number}"))
        return sum(name.startswith("/") for name in names)

    @staticmethod
    def payloads(root: Path) -> list[Path]:
        return sorted((root / "kv").rglob("*.kv"))

    @staticmethod
    def fill(root: Path, numbers=range(5), pinned=(), limit_bytes: int | None = 1 << 30) -> Path:
        """A closed store with these chunks."""
        with contextlib.closing(DiskStore(root, limit_bytes)) as store:
            for number in numbers:
                Lab.put(store, number)
            for number in pinned:
                store.pin(Lab.namespace, Lab.key(number))
        return root

    @staticmethod
    def intact(root: Path, numbers=range(10)) -> list[int]:
        """Those of the chunks that a closed store has, bit-exact."""
        with contextlib.closing(DiskStore(root, None)) as store:
            assert store.stats().entries == len(Lab.payloads(root))
            return Lab.right(store, numbers)
