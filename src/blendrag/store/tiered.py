"""Memory over disk: chunks are read from memory if they are there, and promoted to it from disk.

Promotion happens in one background thread, after the query has closed its reader. It reads the whole
chunk once more, verified, through the query's open file, of which the query may have read only some layers.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from blendrag.errors import NoThreadError, StoreError, starting_thread
from blendrag.store.base import Counters, KVReader, PinScope, ProcessBound, StoreStats
from blendrag.store.disk import DiskStore
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.kv import ChunkKV, KVLayout
from blendrag.store.memory import MemoryBlock, MemoryStore
from blendrag.store.reader import DiskReader

logger = logging.getLogger("blendrag.store")

#: Chunks that may wait for promotion, each with an open file.
QUEUE_CHUNKS = 64
#: How often uses are written to the index while nothing else happens.
RECENCY_INTERVAL_S = 30.0


class PromotingReader:
    """A disk reader that leaves its open file to the promotion if a layer was read."""

    tier = "disk"

    def __init__(self, namespace: str, reader: DiskReader, promotion: Promotion) -> None:
        self.key = reader.key
        self.tokens = reader.tokens
        self._namespace = namespace
        self._reader = reader
        self._promotion = promotion
        self._was_read = self._failed = self._closed = False

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        if self._closed:
            raise ValueError(f"reader of {self.key[:12]}… is closed")
        try:
            self._reader.read_layer(layer, out)
        except BaseException:
            self._failed = True
            raise
        self._was_read = True

    def is_cached(self) -> bool:
        return self._reader.is_cached()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        is_offered = self._was_read and not self._failed
        if not (is_offered and self._promotion.offer(self._namespace, self._reader)):
            self._reader.close()


class Promotion:
    """The background thread: promotes chunks, and writes uses to the index now and then."""

    def __init__(self, memory: MemoryStore, disk: DiskStore) -> None:
        self.counters = Counters()
        self._memory = memory
        self._disk = disk
        self._jobs: queue.Queue[tuple[str, DiskReader] | None] = queue.Queue(QUEUE_CHUNKS)
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._closed = False

    def offer(self, namespace: str, reader: DiskReader) -> bool:
        """Queue a chunk, whose reader then belongs to the thread.

        ``False`` if that is not possible: the queue is full, or no thread can be started.
        """
        if self._disk.is_inherited or self._memory.contains(namespace, reader.key):
            return False
        with self._start_lock:
            if self._closed:
                return False
            try:
                if self._thread is None:
                    name = "blendrag-promotion"
                    thread = threading.Thread(target=self._run, name=name, daemon=True)
                    with starting_thread():
                        thread.start()
                    self._thread = thread
                self._jobs.put_nowait((namespace, reader))
            except (queue.Full, NoThreadError):
                self.counters.add("drops")
                return False
        return True

    def drain(self) -> None:
        """Block until every job queued so far is done."""
        if self._thread is not None:
            self._jobs.join()

    def close(self) -> None:
        """Finish the queue and end the thread. Idempotent."""
        with self._start_lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=RECENCY_INTERVAL_S)
            except queue.Empty:
                with _best_effort("uses were not noted"):
                    self._disk.flush_recency()
                continue
            try:
                if job is None:
                    return
                with _best_effort("a chunk was not promoted to memory"):
                    self._promote(*job)
            finally:
                self._jobs.task_done()

    def _promote(self, namespace: str, reader: DiskReader) -> None:
        with contextlib.closing(reader):
            if self._memory.contains(namespace, reader.key) or reader.is_unlinked():
                return  # promoted, deleted or evicted meanwhile
            block = MemoryBlock.empty(reader.layout, reader.tokens)
            for number, layer in enumerate(block.layers):
                reader.read_stored(number, [layer.data])
            if self._memory.insert(namespace, reader.key, block):
                self.counters.add("promotions")


@contextlib.contextmanager
def _best_effort(failure: str) -> Iterator[None]:
    """Log any failure: chunks are still served from disk, and the thread goes on."""
    try:
        yield
    except Exception as exc:
        level = logging.INFO if isinstance(exc, StoreError) else logging.WARNING
        logger.log(level, "%s: %s", failure, exc)


class TieredStore(ProcessBound):
    """The :class:`KVStore` that the engine uses. Thread-safe."""

    def __init__(self, memory: MemoryStore, disk: DiskStore) -> None:
        super().__init__()
        self.memory = memory
        self.disk = disk
        self._promotion = Promotion(memory, disk)
        self._closed = False

    @property
    def read_only(self) -> bool:
        return self.disk.read_only

    def put(self, namespace: str, key: str, kv: ChunkKV) -> None:
        """See :meth:`KVStore.put`. Only to disk: an ingest would flush the memory tier."""
        self.disk.put(namespace, key, kv)

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> KVReader | None:
        self.check_process()
        reader = self.memory.open(namespace, key, layout, tokens)
        if reader is not None:
            self.disk.note_use(namespace, key)
            return reader
        on_disk = self.disk.open(namespace, key, layout, tokens)
        if on_disk is None or stored_chunk_bytes(layout, tokens) > self.memory.limit_bytes:
            return on_disk
        return PromotingReader(namespace, on_disk, self._promotion)

    def contains(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.contains`: on disk. A copy in memory would not survive a restart."""
        return self.disk.contains(namespace, key)

    def delete(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.delete`. A reader that is open now promotes nothing any more."""
        on_disk = self.disk.delete(namespace, key)
        self._promotion.drain()
        return self.memory.delete(namespace, key) or on_disk

    def keys(self, namespace: str) -> Iterator[str]:
        return self.disk.keys(namespace)

    def pin_scope(self) -> AbstractContextManager[PinScope]:
        return self.disk.pin_scope()

    def pin(self, namespace: str, key: str) -> None:
        self.disk.pin(namespace, key)

    def stats(self) -> StoreStats:
        """What is on disk. A hit in either tier is a hit, a miss in both is a miss.

        Evictions are those from disk: after one from memory nothing has to be computed again.
        """
        disk, memory = self.disk.stats(), self.memory.stats()
        return replace(
            disk,
            hits=disk.hits + memory.hits,
            promotions=self._promotion.counters["promotions"],
            queue_drops=self._promotion.counters["drops"],
            tiers=memory.tiers + disk.tiers,
        )

    def drain(self) -> None:
        """Block until every promotion queued so far is done."""
        self.check_process()
        self._promotion.drain()

    def close(self) -> None:
        """Finish queued promotions and close both tiers. Idempotent. Does nothing in a fork."""
        if self._closed or self.is_inherited:
            return
        self._closed = True
        self._promotion.close()
        self.memory.close()
        self.disk.close()
