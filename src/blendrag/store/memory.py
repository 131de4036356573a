"""The memory tier: verified chunks as plain bytes, a byte limit, least recently used dropped first.

Encoded chunks stay encoded: the limit then holds twice as many, and decoding from memory is still faster
than reading and decoding. The tier owns copies, which were verified when they came in.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from blendrag.errors import StoreFullError
from blendrag.store.base import Counters, ProcessBound, StoreStats
from blendrag.store.durable import readable_size
from blendrag.store.encodings import stored_bytes_by_layer
from blendrag.store.encodings.codec import stored_layers
from blendrag.store.kv import ChunkKV, KVLayout
from blendrag.store.reader import LayerReader, copy_bytes
from blendrag.store.tensor_bytes import tensor_buffer


@dataclass(frozen=True)
class MemoryBlock:
    """One chunk's stored layers. Not changed once it is in a store."""

    layout: KVLayout
    tokens: int
    layers: list[np.ndarray]
    """uint8 ``[n]`` each."""

    @staticmethod
    def empty(layout: KVLayout, tokens: int) -> MemoryBlock:
        """A block for all layers with undefined content."""
        sizes = stored_bytes_by_layer(layout, tokens)
        return MemoryBlock(layout, tokens, [np.empty(size, dtype=np.uint8) for size in sizes])

    @property
    def size_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


class MemoryReader(LayerReader):
    """A :class:`KVReader` over a block, which stays alive after its eviction."""

    tier = "memory"

    def __init__(self, key: str, block: MemoryBlock, on_read: Callable[[int], None]) -> None:
        super().__init__(key, block.layout, block.tokens)
        self._on_read = on_read
        self._block: MemoryBlock | None = block

    def read_stored(self, layer: int, buffers: list[memoryview]) -> None:
        if self._block is None:
            raise self.closed_error()
        stored = self._block.layers[layer]
        copy_bytes(stored, buffers)
        self._on_read(stored.nbytes)

    def release(self) -> None:
        self._block = None


class MemoryStore(ProcessBound):
    """The part of :class:`KVStore` that a query needs: no pins and no keys. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, str], MemoryBlock] = OrderedDict()
        self._size_bytes = 0
        self._counters = Counters()

    def put(self, namespace: str, key: str, kv: ChunkKV) -> None:
        """See :meth:`KVStore.put`; lost when the process ends."""
        if self.contains(namespace, key):
            return
        block = MemoryBlock.empty(kv.layout, kv.tokens)
        for target, layer in zip(block.layers, stored_layers(key, kv), strict=True):
            target[:] = np.frombuffer(tensor_buffer(layer), dtype=np.uint8)
        if not self.insert(namespace, key, block):
            raise StoreFullError(
                f"the memory tier's limit of {readable_size(self.limit_bytes)} has no room for "
                f"{readable_size(block.size_bytes)} more; raise ram_bytes",
                block.size_bytes,
            )

    def insert(self, namespace: str, key: str, block: MemoryBlock) -> bool:
        """Take over a complete and verified block; ``False`` if it is larger than the limit."""
        entry, size_bytes = (namespace, key), block.size_bytes
        if size_bytes > self.limit_bytes:
            return False
        with self._lock:
            if entry in self._blocks:
                return True
            while self._size_bytes + size_bytes > self.limit_bytes:
                self._drop(next(iter(self._blocks)))
                self._counters.add("evictions")
            self._blocks[entry] = block
            self._size_bytes += size_bytes
        return True

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes more would evict nothing."""
        with self._lock:
            return self._size_bytes + size_bytes <= self.limit_bytes

    def _drop(self, entry: tuple[str, str]) -> None:
        """Caller holds the lock."""
        self._size_bytes -= self._blocks.pop(entry).size_bytes

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> MemoryReader | None:
        entry = (namespace, key)
        with self._lock:
            block = self._blocks.get(entry)
            if block is None or block.tokens != tokens or block.layout != layout:
                self._counters.add("misses")
                return None
            self._counters.add("hits")
            self._blocks.move_to_end(entry)
        return MemoryReader(key, block, partial(self._counters.add, "read_bytes"))

    def contains(self, namespace: str, key: str) -> bool:
        with self._lock:
            return (namespace, key) in self._blocks

    def recent_keys(self, most: int) -> list[str]:
        """Keys of at most that many entries of all namespaces, most recently used first."""
        with self._lock:
            return [key for _, key in islice(reversed(self._blocks), most)]

    def delete(self, namespace: str, key: str) -> bool:
        with self._lock:
            if was_there := (namespace, key) in self._blocks:
                self._drop((namespace, key))
        return was_there

    def stats(self) -> StoreStats:
        with self._lock:
            entries, size_bytes = len(self._blocks), self._size_bytes
        return self._counters.stats("memory", entries, size_bytes, self.limit_bytes)

    def close(self) -> None:
        """Drop everything. Idempotent."""
        with self._lock:
            self._blocks.clear()
            self._size_bytes = 0
