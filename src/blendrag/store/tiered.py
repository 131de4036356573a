"""Memory over disk: read from memory if it is there, promote what was read from disk.

Owns which tier is asked for what; the tiers know nothing of one another, and how a chunk gets from
one to the other is :mod:`promotion`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from blendrag.store.base import KVReader, StoreStats
from blendrag.store.disk import DiskStore
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.forking import StaysHere
from blendrag.store.kv import ChunkKV, KVLayout
from blendrag.store.memory import MemoryStore
from blendrag.store.pins import Scope
from blendrag.store.promotion import PromotingReader, Promotion


class TieredStore(StaysHere):
    """The :class:`KVStore` the engine uses. Thread-safe."""

    def __init__(self, memory: MemoryStore, disk: DiskStore) -> None:
        self.memory = memory
        self.disk = disk
        self._promotion = Promotion(memory, disk)
        self._closed = False

    @property
    def read_only(self) -> bool:
        """See :attr:`KVStore.read_only`."""
        return self.disk.read_only

    def put(self, namespace: str, key: str, kv: ChunkKV) -> None:
        """See :meth:`KVStore.put`. To disk only: an ingest would merely flush the memory tier."""
        self.disk.put(namespace, key, kv)

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> KVReader | None:
        """See :meth:`KVStore.open`."""
        reader = self.memory.open(namespace, key, layout, tokens)
        if reader is not None:
            self.disk.note_use(namespace, key)
            return reader
        on_disk = self.disk.open(namespace, key, layout, tokens)
        if on_disk is None or stored_chunk_bytes(layout, tokens) > self.memory.limit_bytes:
            return on_disk
        return PromotingReader(namespace, on_disk, self._promotion)

    def contains(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.contains`: on disk. A copy in memory only would not be there again."""
        return self.disk.contains(namespace, key)

    def delete(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.delete`. A reader that is open now promotes nothing any more."""
        on_disk = self.disk.delete(namespace, key)
        self._promotion.drain()
        return self.memory.delete(namespace, key) or on_disk

    def keys(self, namespace: str) -> Iterator[str]:
        """See :meth:`KVStore.keys`: those that would survive a restart."""
        return self.disk.keys(namespace)

    def pin_scope(self) -> AbstractContextManager[Scope]:
        """See :meth:`KVStore.pin_scope`."""
        return self.disk.pin_scope()

    def pin(self, namespace: str, key: str) -> None:
        """See :meth:`KVStore.pin`: on disk. Its copy in memory comes and goes as any."""
        self.disk.pin(namespace, key)

    def stats(self) -> StoreStats:
        """What is on disk; a hit in either tier is a hit, a miss in both is a miss.

        Evictions are those from disk: after one from memory nothing has to be computed again.
        """
        disk, memory = self.disk.stats(), self.memory.stats()
        return StoreStats(
            disk.entries,
            disk.size_bytes,
            disk.hits + memory.hits,
            disk.misses,
            disk.evictions,
            disk.quarantined,
            puts=disk.puts,
            promotions=self._promotion.tally["promotions"],
            queue_drops=self._promotion.tally["drops"],
            tiers=memory.tiers + disk.tiers,
        )

    def drain(self) -> None:
        """Block until every promotion queued so far is done."""
        self._promotion.drain()

    def close(self) -> None:
        """Finish what is queued, close both tiers. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._promotion.close()
        self.memory.close()
        self.disk.close()
