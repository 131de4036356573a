"""Memory over disk, and optionally a remote tier below them that other machines share.

Chunks are read from memory if they are there, and promoted to it from disk. What is read from the remote tier
is kept on the local disk afterwards; what is put on the local disk is copied to the remote in the background.

Promotion happens in one background thread, after the query has closed its reader. It reads the whole
chunk once more, verified, through the query's open file, of which the query may have read only some layers.
From the remote it requests only the layers that the query did not read.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from blendrag.errors import (
    NoThreadError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    starting_thread,
)
from blendrag.store.base import Counters, KVReader, PinScope, ProcessBound, StoreStats
from blendrag.store.disk import DiskStore
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.identity import is_learned
from blendrag.store.kv import ChunkKV, KVLayout
from blendrag.store.memory import MemoryBlock, MemoryStore
from blendrag.store.reader import DiskReader
from blendrag.store.remote.agreement import Agreement, Probe
from blendrag.store.remote.tier import RemoteReader, RemoteTier
from blendrag.store.remote.uploads import Uploads

logger = logging.getLogger("blendrag.store")

#: Chunks that may wait for promotion, each with an open file.
QUEUE_CHUNKS = 64
#: How often uses are written to the index, and failed copies tried again, while nothing else happens.
RECENCY_INTERVAL_S = 30.0
#: Bytes of chunks from the remote tier that may wait to be kept on the local disk.
KEPT_BYTES = 512 << 20
#: Longest wait for the layers that a query did not read; when the store is closed, for those of all chunks.
REST_S = 30.0


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
    """The background thread: promotes chunks, and now and then writes uses to the index."""

    def __init__(
        self, memory: MemoryStore, disk: DiskStore, uploads: Uploads | None = None
    ) -> None:
        """``uploads``: what is told of chunks that are in the remote."""
        self.counters = Counters()
        self._uploads = uploads
        self._memory = memory
        self._disk = disk
        self._jobs: queue.Queue[tuple[str, DiskReader | RemoteReader] | threading.Event | None]
        self._jobs = queue.Queue(QUEUE_CHUNKS)
        self._end_at = math.inf
        self._kept_bytes = 0
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._closed = False

    def keep(self, reader: RemoteReader) -> None:
        """Queue a chunk that was read from the remote tier, to be kept on the local disk."""
        size_bytes = reader.frame.file_bytes
        with self._start_lock:
            fits = self._kept_bytes + size_bytes <= KEPT_BYTES
            self._kept_bytes += size_bytes * fits
        if not fits:
            self.counters.add("drops")
        elif self.offer(reader.namespace, reader):
            return
        else:
            self._kept_bytes -= size_bytes
        reader.release()

    def offer(self, namespace: str, reader: DiskReader | RemoteReader) -> bool:
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
        thread, is_done = self._thread, threading.Event()
        if thread is not None:
            self._jobs.put(is_done)
            while thread.is_alive() and not is_done.wait(0.5):
                pass

    def close(self) -> None:
        """Finish the queue, as far as the remote gives chunks in time, and end the thread. Idempotent."""
        with self._start_lock:
            self._closed = True
            self._end_at = time.monotonic() + REST_S
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
                if self._uploads is not None:
                    self._uploads.try_again()
                continue
            if job is None:
                return
            if isinstance(job, threading.Event):
                job.set()
                continue
            namespace, reader = job
            if isinstance(reader, RemoteReader):
                with _best_effort("a chunk from the remote was not kept on the local disk"):
                    self._keep(reader)
            else:
                with _best_effort("a chunk was not promoted to memory"):
                    self._promote(namespace, reader)

    def _promote(self, namespace: str, reader: DiskReader) -> None:
        with contextlib.closing(reader):
            if self._memory.contains(namespace, reader.key) or reader.is_unlinked():
                return  # promoted, deleted or evicted meanwhile
            block = MemoryBlock.empty(reader.layout, reader.tokens)
            for number, layer in enumerate(block.layers):
                reader.read_stored(number, [layer.data])
            if self._memory.insert(namespace, reader.key, block):
                self.counters.add("promotions")

    def _keep(self, reader: RemoteReader) -> None:
        try:
            layers = reader.whole(min(REST_S, self._end_at - time.monotonic()))
            if self._uploads is not None:
                self._uploads.note_known(reader.namespace, reader.key)
            place, checksums = (reader.namespace, reader.key), reader.checksums
            if not self._disk.read_only:
                self._disk.put_stored(*place, reader.frame, checksums, layers)
            arrays = [np.frombuffer(layer, dtype=np.uint8) for layer in layers]
            if self._memory.insert(*place, MemoryBlock(reader.layout, reader.tokens, arrays)):
                self.counters.add("promotions")
        finally:
            self._kept_bytes -= reader.frame.file_bytes
            reader.release()


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

    def __init__(
        self, memory: MemoryStore, disk: DiskStore, remote: RemoteTier | None = None
    ) -> None:
        super().__init__()
        self.memory = memory
        self.disk = disk
        self.remote = remote
        self._agreement = Agreement(disk, remote) if remote is not None else None
        self._uploads: Uploads | None = None
        if remote is not None and self._agreement is not None and not disk.read_only:
            self._uploads = Uploads(disk, remote, self._agreement)
        self._promotion = Promotion(memory, disk, self._uploads)
        self._closed = False

    @property
    def read_only(self) -> bool:
        return self.disk.read_only

    def put(self, namespace: str, key: str, kv: ChunkKV) -> None:
        """See :meth:`KVStore.put`. Only to disk: an ingest would flush the memory tier.

        What was learned from prompts stays on this machine.
        """
        self.disk.put(namespace, key, kv)
        if is_learned(namespace):
            return
        if self._uploads is not None and not self._uploads.offer(namespace, key):
            raise StoreFullError(
                f"a chunk was evicted from store {self.disk.root} before it was copied to the remote; allow "
                "more with --disk-bytes"
            )

    @property
    def is_behind(self) -> bool:
        """See :attr:`KVStore.is_behind`."""
        return self._uploads is not None and self._uploads.are_behind

    def agrees(
        self, namespace: str, probe: Callable[[], Probe] | None = None, create: bool = False
    ) -> bool:
        """See :meth:`KVStore.agrees`."""
        return self._agreement is None or self._agreement.reach(namespace, probe, create)

    def _shares(self, namespace: str) -> RemoteTier | None:
        """The remote, if its KV of that namespace may be used."""
        agreed = self._agreement is not None and namespace in self._agreement
        return self.remote if agreed else None

    def flush(self) -> None:
        """See :meth:`KVStore.flush`."""
        if self._uploads is not None:
            self._uploads.flush()

    def claim(self, namespace: str, keys: Iterable[str]) -> None:
        """See :meth:`KVStore.claim`."""
        listed = sorted(set(keys))
        if self.remote is None or self._uploads is None or not listed:
            return
        gone = self.remote.claim(namespace, listed)
        if gone:
            self._uploads.forget_known(namespace, gone)
            raise StoreUnavailableError(
                f"{len(gone)} chunks are no longer in remote {self.remote.url} (blendrag store gc --remote?) "
                "or are damaged; run this again, which copies or computes them"
            )

    def expect(
        self,
        namespace: str,
        layout: KVLayout,
        wanted: Iterable[tuple[str, int]],
        first_s: Callable[[], float] | None = None,
    ) -> None:
        """See :meth:`KVStore.expect`. Calls and looks at nothing without a remote."""
        if self.remote is None:
            return
        self.remote.begin_prompt()
        if self._shares(namespace) is None:
            return
        is_asked = False
        for key, tokens in wanted:
            if not self.contains_here(namespace, key):
                self.remote.expect(namespace, key, layout, tokens)
                is_asked = True
        if is_asked and first_s is not None:
            self.remote.limit_first(first_s())

    def prefetch(
        self,
        namespace: str,
        key: str,
        layout: KVLayout,
        tokens: int,
        stop: Callable[[], bool],
    ) -> bool:
        """See :meth:`KVStore.prefetch`."""
        size_bytes = stored_chunk_bytes(layout, tokens)
        if self.memory.contains(namespace, key) or not self.memory.has_room(size_bytes):
            return True
        reader = self.disk.peek(namespace, key, layout, tokens)
        if reader is None:
            return True
        with contextlib.closing(reader), _best_effort("a chunk was not read ahead"):
            block = MemoryBlock.empty(layout, tokens)
            for number, layer in enumerate(block.layers):
                if stop():
                    return False
                reader.read_stored(number, [layer.data])
            if self.memory.has_room(size_bytes):
                self.memory.insert(namespace, key, block)
        return True

    @property
    def trouble(self) -> str:
        """See :attr:`KVStore.trouble`."""
        return self.remote.trouble if self.remote is not None else ""

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> KVReader | None:
        self.check_process()
        reader = self.memory.open(namespace, key, layout, tokens)
        if reader is not None:
            self.disk.note_use(namespace, key)
            return reader
        on_disk = self.disk.open(namespace, key, layout, tokens)
        remote = self._shares(namespace)
        if on_disk is None and remote is not None:
            from_remote = remote.open(namespace, key, layout, tokens)
            if from_remote is not None:
                from_remote.on_close = self._promotion.keep
            return from_remote
        if on_disk is None or stored_chunk_bytes(layout, tokens) > self.memory.limit_bytes:
            return on_disk
        return PromotingReader(namespace, on_disk, self._promotion)

    def contains(self, namespace: str, key: str) -> bool:
        return bool(self.contained(namespace, [key]))

    def contained(self, namespace: str, keys: Iterable[str]) -> set[str]:
        """See :meth:`KVStore.contained`: on disk or in the remote, as memory does not survive a restart.

        What is on disk only is copied to the remote in the background.
        """
        wanted = set(keys)
        here = {
            key
            for key in wanted
            if self.disk.contains(namespace, key)
            and (self._uploads is None or self._uploads.offer(namespace, key, waits=False))
        }
        if self.remote is None or here == wanted or not self.agrees(namespace):
            return here
        return here | self.remote.contained(namespace, wanted - here)

    def contains_here(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.contains_here`."""
        return self.memory.contains(namespace, key) or self.disk.contains(namespace, key)

    def found(self, namespace: str, keys: Iterable[str]) -> set[str]:
        """See :meth:`KVStore.found`."""
        wanted = set(keys)
        here = {key for key in wanted if self.contains_here(namespace, key)}
        remote = self._shares(namespace)
        return here if remote is None else here | remote.found(namespace, wanted - here)

    def delete(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.delete`. A reader that is open now promotes nothing any more.

        The remote keeps the entry, because other machines may use it.
        """
        on_disk = self.disk.delete(namespace, key)
        self._promotion.drain()
        return self.memory.delete(namespace, key) or on_disk

    def keys(self, namespace: str) -> Iterator[str]:
        """See :meth:`KVStore.keys`: those on disk."""
        return self.disk.keys(namespace)

    def ensure_remote(self, namespace: str, keys: frozenset[str]) -> frozenset[str]:
        """Those of ``keys`` that are durable in the remote, after copying what only this machine has.

        Raises :class:`StoreUnavailableError`, also without a remote.
        """
        if self.remote is None or self._uploads is None:
            raise StoreUnavailableError(
                f"store {self.disk.root} is read-only or has no remote, expected one that copies its KV; "
                "open it with a remote"
            )
        if not self.agrees(namespace):
            raise StoreUnavailableError(
                self.remote.trouble
                or f"KV of remote {self.remote.url} was not compared with what this machine computes; ingest "
                "again with this remote"
            )
        there = self.remote.durable(namespace, keys)
        copied = {key for key in keys - there if self.disk.contains(namespace, key)}
        for key in sorted(copied):
            self._uploads.offer(namespace, key, is_missing=True)
        self._uploads.flush()
        return frozenset(there | copied)

    def resident(self, most: int) -> tuple[list[str], list[str]]:
        """Keys in memory and keys on disk, at most that many of each, most recently used first."""
        return self.memory.recent_keys(most), self.disk.recent_keys(most)

    def pin_scope(self) -> AbstractContextManager[PinScope]:
        """See :meth:`KVStore.pin_scope`. What the remote keeps may be evicted here."""
        return self.disk.pin_scope() if self.remote is None else nullcontext(PinScope())

    def pin(self, namespace: str, key: str) -> None:
        self.disk.pin(namespace, key)

    def learned_limit_bytes(self) -> int:
        """See :meth:`KVStore.learned_limit_bytes`."""
        return self.disk.learned_limit_bytes()

    def give_up_learned(self, size_bytes: int) -> bool:
        """See :meth:`KVStore.give_up_learned`."""
        return self.disk.give_up_learned(size_bytes)

    def stats(self) -> StoreStats:
        """What is on disk. A hit in either tier is a hit, a miss in both is a miss.

        Evictions are those from disk: after one from memory nothing has to be computed again.
        """
        disk, memory = self.disk.stats(), self.memory.stats()
        found = replace(
            disk,
            hits=disk.hits + memory.hits,
            promotions=self._promotion.counters["promotions"],
            queue_drops=self._promotion.counters["drops"],
            tiers=memory.tiers + disk.tiers,
        )
        if self.remote is None:
            return found
        tier = self.remote.tier_stats()
        return replace(
            found,
            hits=found.hits + tier.hits,
            misses=found.misses - tier.hits,
            uploads=self.remote.counters["puts"],
            remote_failures=self.remote.counters["failures"],
            tiers=(*found.tiers, tier),
        )

    def drain(self) -> None:
        """Block until every promotion queued so far is done."""
        self.check_process()
        self._promotion.drain()

    def close(self) -> None:
        """Finish queued promotions and copies, close the tiers. Idempotent. Does nothing in a fork."""
        if self._closed or self.is_inherited:
            return
        self._closed = True
        self._promotion.close()
        if self._uploads is not None:
            self._uploads.close()
        if self.remote is not None:
            self.remote.close()
        self.memory.close()
        self.disk.close()
