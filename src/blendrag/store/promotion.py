"""Promotion to the memory tier, in one background thread, after the query has closed its reader.

It reads the whole chunk once more, verified, through the query's open file, of which the query may have read
only some layers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from blendrag.errors import NoThreadError, StoreError, starting_thread
from blendrag.store.base import Counters
from blendrag.store.disk import DiskStore
from blendrag.store.memory import MemoryBlock, MemoryStore
from blendrag.store.reader import DiskReader

logger = logging.getLogger("blendrag.store")

#: Chunks that may wait for promotion, each with an open file.
QUEUE_CHUNKS = 64
#: How often uses are written to the index, and failed copies tried again, while nothing else happens.
RECENCY_INTERVAL_S = 30.0
#: Once the store is closed, how long the thread may wait for layers from a remote.
CLOSING_S = 30.0


class Promotion:
    """The background thread: promotes chunks, and now and then writes uses to the index."""

    def __init__(self, memory: MemoryStore, disk: DiskStore) -> None:
        self.counters = Counters()
        self.when_idle: Callable[[], None] = lambda: None
        """Called every :data:`RECENCY_INTERVAL_S` in which nothing else happens."""
        self._memory = memory
        self._disk = disk
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_CHUNKS)
        self._end_at = math.inf
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._closed = False

    @property
    def left_s(self) -> float:
        """How long a job may wait for something."""
        return min(CLOSING_S, self._end_at - time.monotonic())

    def offer(self, namespace: str, reader: DiskReader) -> bool:
        """Queue a chunk, whose reader then belongs to the thread; ``False`` if that is not possible."""
        return self.submit(namespace, reader.key, partial(self._promote, namespace, reader))

    def submit(self, namespace: str, key: str, job: Callable[[], None]) -> bool:
        """Queue a job that brings an entry to memory.

        ``False`` if it is there, the queue is full, or no thread can be started.
        """
        if self._disk.is_inherited or self._memory.contains(namespace, key):
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
                self._jobs.put_nowait(job)
            except (queue.Full, NoThreadError):
                self.counters.add("drops")
                return False
        return True

    def insert(self, namespace: str, key: str, block: MemoryBlock) -> None:
        """Give the memory tier a complete and verified block."""
        if self._memory.insert(namespace, key, block):
            self.counters.add("promotions")

    def drain(self) -> None:
        """Block until every job queued so far is done."""
        thread, is_done = self._thread, threading.Event()
        if thread is not None:
            self._jobs.put(is_done.set)
            while thread.is_alive() and not is_done.wait(0.5):
                pass

    def close(self) -> None:
        """Finish the queue, as far as a remote gives chunks in time, and end the thread. Idempotent."""
        with self._start_lock:
            self._closed = True
            self._end_at = time.monotonic() + CLOSING_S
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=RECENCY_INTERVAL_S)
            except queue.Empty:
                with best_effort("uses were not noted"):
                    self._disk.flush_recency()
                self.when_idle()
                continue
            if job is None:
                return
            with best_effort("a chunk was not promoted to memory"):
                job()

    def _promote(self, namespace: str, reader: DiskReader) -> None:
        try:
            if self._memory.contains(namespace, reader.key) or reader.is_unlinked():
                return  # promoted, deleted or evicted meanwhile
            block = MemoryBlock.empty(reader.layout, reader.tokens)
            for number, layer in enumerate(block.layers):
                reader.read_stored(number, [layer.data])
            self.insert(namespace, reader.key, block)
        finally:
            reader.release()


@contextlib.contextmanager
def best_effort(failure: str) -> Iterator[None]:
    """Log any failure: chunks are still served from disk, and the thread goes on."""
    try:
        yield
    except Exception as exc:
        level = logging.INFO if isinstance(exc, StoreError) else logging.WARNING
        logger.log(level, "%s: %s", failure, exc)
