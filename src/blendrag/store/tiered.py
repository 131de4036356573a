"""Memory over disk: read from memory if it is there, promote what was read from disk.

Owns the promotion and its thread; the tiers know nothing of one another. Promotion re-reads the
whole chunk, verified, through the query's own open file after the query has closed it: the query
copies nothing twice, and may have read some of the layers only, as blending does. It is best
effort: when the queue is full, a chunk simply stays on disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from blendrag.errors import StoreError
from blendrag.kv import ChunkKV, KVLayout
from blendrag.store.base import KVReader, StoreStats
from blendrag.store.disk import DiskStore
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.forking import renew_after_fork
from blendrag.store.memory import Block, MemoryStore
from blendrag.store.pins import Scope
from blendrag.store.reader import DiskReader
from blendrag.store.tally import Tally

logger = logging.getLogger("blendrag.store")

#: Chunks that may wait for promotion, each with an open file.
QUEUE_CHUNKS = 64
#: How often uses are written to the index while nothing else happens.
RECENCY_INTERVAL_S = 30.0


class _Job(NamedTuple):
    namespace: str
    key: str
    reader: DiskReader


class TieredStore:
    """The :class:`KVStore` the engine uses. Thread-safe."""

    def __init__(self, memory: MemoryStore, disk: DiskStore) -> None:
        self.memory = memory
        self.disk = disk
        self._worker = _Worker(memory, disk)
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
        return _PromotingReader(namespace, on_disk, self._worker)

    def contains(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.contains`: on disk. A copy in memory only would not be there again."""
        return self.disk.contains(namespace, key)

    def delete(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.delete`. A reader that is open now promotes nothing any more."""
        on_disk = self.disk.delete(namespace, key)
        self._worker.drain()
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
            promotions=self._worker.tally["promotions"],
            queue_drops=self._worker.tally["drops"],
            tiers=memory.tiers + disk.tiers,
        )

    def drain(self) -> None:
        """Block until every promotion queued so far is done."""
        self._worker.drain()

    def close(self) -> None:
        """Finish what is queued, close both tiers. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._worker.close()
        self.memory.close()
        self.disk.close()


class _PromotingReader:
    """A disk reader that, if it was of use, leaves its file for the promotion."""

    tier = "disk"

    def __init__(self, namespace: str, reader: DiskReader, worker: _Worker) -> None:
        self.key = reader.key
        self.tokens = reader.tokens
        self._namespace = namespace
        self._reader = reader
        self._worker = worker
        self._was_read = self._failed = False
        self._closed = False

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        """See :meth:`KVReader.read_layer`."""
        if self._closed:
            raise ValueError(f"reader of {self.key[:12]}… is closed")
        try:
            self._reader.read_layer(layer, out)
        except BaseException:
            self._failed = True
            raise
        self._was_read = True

    def close(self) -> None:
        """See :meth:`KVReader.close`."""
        if self._closed:
            return
        self._closed = True
        job = _Job(self._namespace, self.key, self._reader)
        if not self._was_read or self._failed or not self._worker.offer(job):
            self._reader.close()


class _Worker:
    """One background thread: promotes chunks, and writes uses to the index now and then."""

    def __init__(self, memory: MemoryStore, disk: DiskStore) -> None:
        self.tally = Tally()
        self._memory = memory
        self._disk = disk
        self._jobs: queue.Queue[_Job | None] = queue.Queue(QUEUE_CHUNKS)
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._closed = False
        self.renew_locks()
        renew_after_fork(self)

    def renew_locks(self) -> None:
        """See :mod:`forking`. A child has no such thread, and promotes nothing."""
        self._start_lock = threading.Lock()

    def offer(self, job: _Job) -> bool:
        """Queue a job unless the queue is full; from then on the reader is the worker's."""
        if self._pid != os.getpid() or self._memory.contains(job.namespace, job.key):
            return False
        with self._start_lock:
            if self._closed:
                return False
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="blendrag-promotion", daemon=True
                )
                self._thread.start()
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                self.tally.add("drops")
                return False
        return True

    def drain(self) -> None:
        if self._thread is not None and self._pid == os.getpid():
            self._jobs.join()

    def close(self) -> None:
        """Finish the queue and end the thread. Idempotent."""
        with self._start_lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None and self._pid == os.getpid():
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
                    self._promote(job)
            finally:
                self._jobs.task_done()

    def _promote(self, job: _Job) -> None:
        with contextlib.closing(job.reader) as reader:
            if self._memory.contains(job.namespace, job.key):
                return
            if reader.is_unlinked():  # deleted or evicted meanwhile: not to come back
                return
            block = Block.empty(reader.layout, reader.tokens)
            for layer in range(len(reader.layout.layers)):
                reader.read_layer_bytes(layer, block.layer(layer))
            if self._memory.insert(job.namespace, job.key, block):
                self.tally.add("promotions")


@contextlib.contextmanager
def _best_effort(failure: str) -> Iterator[None]:
    """Whatever goes wrong, chunks are still served from disk, and the thread lives on."""
    try:
        yield
    except Exception as exc:
        level = logging.INFO if isinstance(exc, StoreError) else logging.WARNING
        logger.log(level, "%s: %s", failure, exc)
