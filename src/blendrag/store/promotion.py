"""From disk into memory: what a query read is read once more, whole, in the background.

Owns the promotion and its thread. Promotion re-reads the whole chunk, verified, through the query's
own open file after the query has closed it: the query copies nothing twice, and may have read some of
the layers only, as blending does. It is best effort: when the queue is full, a chunk simply stays on
disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from blendrag.errors import NoThreadError, StoreError, starting_thread
from blendrag.store.disk import DiskStore
from blendrag.store.forking import renew_after_fork
from blendrag.store.memory import Block, MemoryStore
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


class PromotingReader:
    """A disk reader that, if it was of use, leaves its file for the promotion."""

    tier = "disk"

    def __init__(self, namespace: str, reader: DiskReader, promotion: Promotion) -> None:
        self.key = reader.key
        self.tokens = reader.tokens
        self._namespace = namespace
        self._reader = reader
        self._promotion = promotion
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

    def is_cached(self) -> bool:
        """See :meth:`DiskReader.is_cached`."""
        return self._reader.is_cached()

    def close(self) -> None:
        """See :meth:`KVReader.close`."""
        if self._closed:
            return
        self._closed = True
        job = _Job(self._namespace, self.key, self._reader)
        if not self._was_read or self._failed or not self._promotion.offer(job):
            self._reader.close()


class Promotion:
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
        """Queue a job unless the queue is full or there can be no thread; from then on the reader is
        the thread's."""
        if self._pid != os.getpid() or self._memory.contains(job.namespace, job.key):
            return False
        with self._start_lock:
            if self._closed:
                return False
            try:
                if self._thread is None:
                    self._thread = self._started()
                self._jobs.put_nowait(job)
            except (queue.Full, NoThreadError):
                self.tally.add("drops")
                return False
        return True

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="blendrag-promotion", daemon=True)
        with starting_thread():
            thread.start()
        return thread

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
