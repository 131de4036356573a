"""The memory tier: verified chunks as plain bytes, a byte limit, least recently used goes first.

Bytes are kept as they are stored, encoded ones encoded: the limit then holds twice as many chunks, and
a chunk decoded from memory is still ahead of one that has to be read and decoded. A promotion is a
copy of what was verified. Where memory has room to spare, the native encoding is the fast one.

Owns copies, so nobody who still holds a tensor that was put can change what is served. Knows
nothing of files. Bytes were verified when they came in (read through a verifying reader, or put by
the model's own process), and are not verified again.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from blendrag.errors import InvalidInputError, StoreFullError
from blendrag.store.base import StoreStats, TierStats
from blendrag.store.disk_errors import megabytes
from blendrag.store.encodings import codec_of, staging_of, stored_layer_bytes
from blendrag.store.forking import StaysHere, renew_after_fork
from blendrag.store.kv import ChunkKV, KVLayout
from blendrag.store.raw import all_finite, check_target, on_cpu, pieces, tensor_buffer
from blendrag.store.tally import Tally


@dataclass(frozen=True)
class Block:
    """One chunk's stored layers behind one another in one buffer."""

    layout: KVLayout
    tokens: int
    data: np.ndarray
    """uint8 ``[size]``, never written to once it is in a store."""
    spans: tuple[slice, ...]
    """Where each layer is."""

    @staticmethod
    def empty(layout: KVLayout, tokens: int) -> Block:
        """A block with room for all layers, contents undefined."""
        spans, begin = [], 0
        for layer in range(len(layout.layers)):
            end = begin + stored_layer_bytes(layout, layer, tokens)
            spans.append(slice(begin, end))
            begin = end
        return Block(layout, tokens, np.empty(begin, dtype=np.uint8), tuple(spans))

    def layer(self, layer: int) -> np.ndarray:
        """One layer's stored bytes, uint8 ``[n]``."""
        return self.data[self.spans[layer]]


class MemoryReader:
    """A :class:`KVReader` over a block, which it keeps alive past its eviction."""

    tier = "memory"

    def __init__(self, key: str, block: Block, on_read: Callable[[int], None]) -> None:
        self.key = key
        self.tokens = block.tokens
        self._on_read = on_read
        self._block: Block | None = block
        self._dtype = block.layout.torch_dtype
        self._staging = staging_of(block.layout, block.tokens)

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        """See :meth:`KVReader.read_layer`. Runs no torch operator, unless it is to decode."""
        block = self._block
        if block is None:
            raise ValueError(f"reader of {self.key[:12]}… is closed")
        stored = block.layer(layer)
        source = int(stored.ctypes.data)
        shape = block.layout.layer_shape(layer, block.tokens)
        if self._staging is None:
            for address, size_bytes in pieces(out, shape, self._dtype):
                ctypes.memmove(address, source, size_bytes)  # releases the GIL
                source += size_bytes
        else:
            check_target(out, shape, self._dtype)
            self._staging.read(layer, lambda room: ctypes.memmove(room, source, stored.nbytes), out)
        self._on_read(stored.nbytes)

    def close(self) -> None:
        """Let go of the block. Idempotent."""
        self._block = None


class MemoryStore(StaysHere):
    """What a query needs of a :class:`KVStore`. Thread-safe; gone with the process.

    Keeps no pins and lists no keys: a chunk in memory comes and goes, what stays is on disk.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._blocks: OrderedDict[tuple[str, str], Block] = OrderedDict()
        self._tally = Tally()
        self.renew_locks()
        renew_after_fork(self)

    def renew_locks(self) -> None:
        """See :mod:`forking`. A thread that is not in the child may have been about to count."""
        self._lock = threading.Lock()
        self._size_bytes = sum(block.data.nbytes for block in self._blocks.values())

    def put(self, namespace: str, key: str, kv: ChunkKV) -> None:
        """See :meth:`KVStore.put`; survives nothing."""
        if self.contains(namespace, key):
            return
        block, codec = Block.empty(kv.layout, kv.tokens), codec_of(kv.layout)
        for i, tensor in enumerate(kv.layers):
            layer = on_cpu(tensor)
            if not all_finite(layer, kv.layout.dtype):
                raise InvalidInputError(
                    f"KV {key[:12]}… has NaN or infinity in layer {i}, expected finite numbers"
                )
            stored = layer if codec is None else codec.encode(i, layer)
            block.layer(i)[:] = np.frombuffer(tensor_buffer(stored), dtype=np.uint8)
        if not self.insert(namespace, key, block):
            raise StoreFullError(
                f"the memory tier's limit of {megabytes(self.limit_bytes)} has no room for "
                f"{megabytes(block.data.nbytes)} more; raise --ram-bytes",
                block.data.nbytes,
            )

    def insert(self, namespace: str, key: str, block: Block) -> bool:
        """Take over a block that is complete and verified; ``False`` if it is over the limit."""
        entry, size_bytes = (namespace, key), block.data.nbytes
        if size_bytes > self.limit_bytes:
            return False
        with self._lock:
            if entry in self._blocks:
                return True
            while self._size_bytes + size_bytes > self.limit_bytes:
                self._drop(next(iter(self._blocks)))
                self._tally.add("evictions")
            self._blocks[entry] = block
            self._size_bytes += size_bytes
        return True

    def _drop(self, entry: tuple[str, str]) -> bool:
        """Caller holds the lock."""
        block = self._blocks.pop(entry, None)
        if block is None:
            return False
        self._size_bytes -= block.data.nbytes
        return True

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> MemoryReader | None:
        """See :meth:`KVStore.open`."""
        entry = (namespace, key)
        with self._lock:
            block = self._blocks.get(entry)
            if block is None or block.tokens != tokens or block.layout != layout:
                self._tally.add("misses")
                return None
            self._tally.add("hits")
            self._blocks.move_to_end(entry)
        return MemoryReader(key, block, partial(self._tally.add, "read_bytes"))

    def contains(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.contains`."""
        with self._lock:
            return (namespace, key) in self._blocks

    def delete(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.delete`."""
        with self._lock:
            return self._drop((namespace, key))

    def stats(self) -> StoreStats:
        """See :class:`StoreStats`."""
        with self._lock:
            entries, size_bytes = len(self._blocks), self._size_bytes
        count = self._tally
        hits, evictions = count["hits"], count["evictions"]
        tier = TierStats(
            "memory", entries, size_bytes, self.limit_bytes, hits, count["read_bytes"], evictions
        )
        return StoreStats(
            entries, size_bytes, hits, count["misses"], evictions, quarantined=0, tiers=(tier,)
        )

    def close(self) -> None:
        """Drop everything. Idempotent."""
        with self._lock:
            self._blocks.clear()
            self._size_bytes = 0
