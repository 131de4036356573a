"""The KV store: memory over disk, and optionally a remote that other machines share.

Chunks are read from memory if they are there, and promoted to it from disk (:mod:`.promotion`). All that
concerns other machines is in :mod:`.remote`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from blendrag.errors import StoreFullError, StoreUnavailableError
from blendrag.store.base import (
    Counters,
    KVReader,
    PinScope,
    Place,
    Probe,
    ProcessBound,
    StoreStats,
    WantedKV,
)
from blendrag.store.disk import DiskStore
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.identity import is_learned
from blendrag.store.kv import ChunkKV, KVLayout
from blendrag.store.memory import MemoryBlock, MemoryStore
from blendrag.store.promotion import Promotion, best_effort
from blendrag.store.remote.shared_kv import SharedKV
from blendrag.store.remote.tier import RemoteTier


class KVStore(ProcessBound):
    """Chunk key → KV: exactly the bytes that were put, or a miss. Thread-safe.

    Keys and namespaces are 64 lowercase hex digits (:mod:`blendrag.store.identity`).
    """

    def __init__(
        self, memory: MemoryStore, disk: DiskStore, remote: RemoteTier | None = None
    ) -> None:
        super().__init__()
        self.memory = memory
        self.disk = disk
        self.remote = remote
        self._promotion = Promotion(memory, disk)
        self._shared = SharedKV(remote, disk, self._promotion) if remote is not None else None
        self._closed = False

    @property
    def read_only(self) -> bool:
        """Whether nothing can be stored: as requested, or because the directory is not writable."""
        return self.disk.read_only

    # -- reading ---------------------------------------------------------------------------------

    def where(
        self,
        namespace: str,
        keys: Iterable[str],
        durable: bool = False,
        ask_remote: bool = True,
    ) -> dict[str, Place]:
        """Where the KV of each key is; a key that is nowhere is left out.

        A remote is asked at once for all keys that are not on this machine. Bytes are verified when they are
        read. ``durable``: only KV that would survive a crash now. What is only on the local disk is then
        copied to the remote in the background.
        """
        self.check_process()
        shared = None if is_learned(namespace) else self._shared
        places: dict[str, Place] = {}
        missing = []
        for key in dict.fromkeys(keys):
            if not durable and self.memory.contains(namespace, key):
                places[key] = "memory"
            elif self.disk.contains(namespace, key) and not (
                durable and shared is not None and not shared.copy(namespace, key, waits=False)
            ):
                places[key] = "disk"
            else:
                missing.append(key)
        if missing and ask_remote and shared is not None:
            places |= dict.fromkeys(shared.found(namespace, missing, durable), "remote")
        return places

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> KVReader | None:
        """Reader of an entry, or ``None`` if it is absent or anything about it is in doubt.

        ``layout`` and ``tokens`` come from the model and the prompt and are compared with the file. Numbers
        found in a file are never computed with.
        """
        return self.open_all([WantedKV(namespace, key, tokens)], layout)[0]

    def open_all(
        self,
        wanted: Sequence[WantedKV],
        layout: KVLayout,
        first_s: Callable[[], float] | None = None,
    ) -> list[KVReader | None]:
        """:meth:`open` for the entries of one prompt, for which a remote is asked at once.

        ``first_s()``: the seconds that the prompt waits for the first bytes from the remote; it is called
        only if the remote is asked.
        """
        self.check_process()
        readers: list[KVReader | None] = []
        try:
            readers += (self._open_here(*each, layout) for each in wanted)
            missing = [at for at, reader in enumerate(readers) if reader is None]
            if missing and self._shared is not None:
                found = self._shared.open_all([wanted[at] for at in missing], layout, first_s)
                for at, remote_reader in zip(missing, found, strict=True):
                    readers[at] = remote_reader
        except BaseException:
            for reader in readers:
                if reader is not None:
                    reader.close()
            raise
        return readers

    def _open_here(
        self, namespace: str, key: str, tokens: int, layout: KVLayout
    ) -> KVReader | None:
        reader = self.memory.open(namespace, key, layout, tokens)
        if reader is not None:
            self.disk.note_use(namespace, key)
            return reader
        on_disk = self.disk.open(namespace, key, layout, tokens)
        if on_disk is None or stored_chunk_bytes(layout, tokens) > self.memory.limit_bytes:
            return on_disk
        on_disk.on_close = partial(self._promotion.offer, namespace)
        return on_disk

    def prefetch(
        self,
        namespace: str,
        key: str,
        layout: KVLayout,
        tokens: int,
        stop: Callable[[], bool],
    ) -> bool:
        """Copy an entry from disk to memory, unless that would evict another.

        Gives up and returns ``False`` if ``stop()``, called before each layer, returns ``True``.
        """
        size_bytes = stored_chunk_bytes(layout, tokens)
        if self.memory.contains(namespace, key) or not self.memory.has_room(size_bytes):
            return True
        reader = self.disk.peek(namespace, key, layout, tokens)
        if reader is None:
            return True
        with contextlib.closing(reader), best_effort("a chunk was not read ahead"):
            block = MemoryBlock.empty(layout, tokens)
            for number, layer in enumerate(block.layers):
                if stop():
                    return False
                reader.read_stored(number, [layer.data])
            if self.memory.has_room(size_bytes):
                self.memory.insert(namespace, key, block)
        return True

    def keys(self, namespace: str) -> Iterator[str]:
        """Keys of one namespace on the local disk, in no particular order.

        Raises :class:`StoreUnavailableError` if any of them cannot be listed.
        """
        return self.disk.keys(namespace)

    def resident(self, most: int) -> tuple[list[str], list[str]]:
        """Keys in memory and keys on disk, at most that many of each, most recently used first."""
        return self.memory.recent_keys(most), self.disk.recent_keys(most)

    def stats(self) -> StoreStats:
        """What is on disk. A hit in any tier is a hit, a miss in all is a miss.

        Evictions are those from disk: after one from memory nothing has to be computed again.
        """
        disk, memory = self.disk.stats(), self.memory.stats()
        remote = Counters() if self.remote is None else self.remote.counters
        shared = remote.stats("remote", 0, 0, 0)  # what a remote holds is not counted
        return replace(
            disk,
            hits=disk.hits + memory.hits + shared.hits,
            misses=disk.misses - shared.hits,
            promotions=self._promotion.counters["promotions"],
            queue_drops=self._promotion.counters["drops"],
            uploads=shared.puts,
            remote_failures=remote["failures"],
            tiers=memory.tiers + disk.tiers + (() if self.remote is None else shared.tiers),
        )

    # -- writing ---------------------------------------------------------------------------------

    def put(self, namespace: str, key: str, kv: ChunkKV) -> None:
        """Store ``kv`` in its layout's encoding. When this returns, the entry survives a crash.

        Putting a key again is a no-op. KV goes to disk only: an ingest would flush the memory tier. KV
        learned from prompts stays on this machine, makes room for all other KV, and takes the place of none.
        Raises :class:`StoreFullError` when there is no room, :class:`InvalidInputError` for NaN or infinity.
        """
        self.disk.put(namespace, key, kv)
        if self._shared is None or is_learned(namespace):
            return
        if not self._shared.copy(namespace, key):
            raise StoreFullError(
                f"a chunk was evicted from store {self.disk.root} before it was copied to the remote; allow "
                "more with --disk-bytes"
            )

    def delete(self, namespace: str, key: str) -> bool:
        """Remove an entry from this machine; whether there was one. A reader that is open now promotes
        nothing any more.

        The remote keeps the entry, because other machines may use it.
        """
        on_disk = self.disk.delete(namespace, key)
        self._promotion.drain()
        return self.memory.delete(namespace, key) or on_disk

    def pin_scope(self) -> AbstractContextManager[PinScope]:
        """Entries that this thread puts while the scope lasts are not evicted to make room for others.

        Ingest runs in a scope: when only its own entries are left to evict, ``put`` raises
        :class:`StoreFullError`. With a remote, which keeps them, they may be evicted here. Readers need no
        pin, because an open file survives eviction.
        """
        return self.disk.pin_scope() if self.remote is None else nullcontext(PinScope())

    def pin(self, namespace: str, key: str) -> None:
        """Never evict this entry, whether it is there or put later, until it is deleted.

        Survives reopening. Its bytes count against the limit, so pin only a few small entries.
        """
        self.disk.pin(namespace, key)

    def learned_limit_bytes(self) -> int:
        """Bytes that KV learned from prompts may take on disk.

        A share of what the limit, and the space that the disk really has, allow; never the place of other KV.
        """
        return self.disk.learned_limit_bytes()

    def give_up_learned(self, size_bytes: int) -> bool:
        """Remove KV learned from prompts, as much as frees ``size_bytes``; whether there was any."""
        return self.disk.give_up_learned(size_bytes)

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
        if self._shared is not None:
            self._shared.close()
        self.memory.close()
        self.disk.close()

    # -- shared with other machines; without a remote there is nothing to do -----------------------

    @property
    def trouble(self) -> str:
        """Why the remote is not asked at the moment; empty if it is, or there is none."""
        return self.remote.trouble if self.remote is not None else ""

    @property
    def is_behind(self) -> bool:
        """Whether :meth:`put` would wait for earlier copies to a remote."""
        return self._shared is not None and self._shared.uploads.are_behind

    def agrees(
        self, namespace: str, probe: Callable[[], Probe] | None = None, create: bool = False
    ) -> bool:
        """Whether a remote holds KV that this machine computes, too; its KV counts as absent until then.

        ``True`` without a remote. See :meth:`blendrag.store.remote.agreement.Agreement.reach`.
        """
        return self._shared is None or self._shared.agreement.reach(namespace, probe, create)

    def flush(self) -> None:
        """Block until everything that this thread put is in the remote tier too.

        Raises :class:`StoreUnavailableError` if that fails.
        """
        if self._shared is not None:
            self._shared.uploads.flush()

    def claim(self, namespace: str, keys: Iterable[str]) -> None:
        """Keep entries from being collected in a remote until they are published.

        Raises :class:`StoreUnavailableError`, also if one was collected meanwhile.
        """
        if self._shared is not None:
            self._shared.claim(namespace, keys)

    def ensure_remote(self, namespace: str, keys: frozenset[str]) -> frozenset[str]:
        """Those of ``keys`` that are durable in the remote, after copying what only this machine has.

        Raises :class:`StoreUnavailableError`, also without a remote.
        """
        if self._shared is None:
            raise StoreUnavailableError(
                f"store {self.disk.root} has no remote, expected one to copy its KV to; open it with a remote"
            )
        return self._shared.ensure(namespace, keys)


def open_store(
    root: Path | str,
    ram_bytes: int,
    disk_bytes: int | None,
    read_only: bool = False,
    remote: Callable[[], RemoteTier] | None = None,
) -> KVStore:
    """Open or create the store at ``root``: ``ram_bytes`` of memory over ``disk_bytes`` of disk.

    ``remote`` opens a tier below them that other machines share. The store remembers ``disk_bytes``.
    ``None`` takes the remembered limit, or else :data:`blendrag.store.root.DEFAULT_DISK_BYTES`. Raises
    :class:`StoreUnavailableError` when the directory cannot be used.
    """
    tier = remote() if remote is not None else None  # before a store is created
    try:
        return KVStore(MemoryStore(ram_bytes), DiskStore(Path(root), disk_bytes, read_only), tier)
    except BaseException:
        if tier is not None:
            tier.close()
        raise
