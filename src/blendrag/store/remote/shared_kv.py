"""What a store on this machine shares with others through a remote.

KV that is put here is copied there in the background. KV that was read from there is kept on the local disk
and in memory afterwards; only the layers that the query did not read are requested once more.

The remote's KV of a namespace counts as absent, and none is copied there, until this machine has compared it
(:mod:`.agreement`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from blendrag.errors import (
    StoreUnavailableError,
)
from blendrag.store.base import WantedKV
from blendrag.store.disk import DiskStore
from blendrag.store.kv import KVLayout
from blendrag.store.memory import MemoryBlock
from blendrag.store.promotion import Promotion, best_effort
from blendrag.store.remote.agreement import Agreement
from blendrag.store.remote.tier import RemoteReader, RemoteTier
from blendrag.store.remote.uploads import Uploads

logger = logging.getLogger("blendrag.store")

#: Bytes of chunks that may wait to be kept on the local disk.
KEPT_BYTES = 512 << 20


class SharedKV:
    """A remote tier as one store uses it. Thread-safe. See :class:`blendrag.store.tiered.KVStore`."""

    def __init__(self, tier: RemoteTier, disk: DiskStore, promotion: Promotion) -> None:
        self.tier = tier
        self.agreement = Agreement(disk, tier)
        self._disk = disk
        self._promotion = promotion
        self.uploads = Uploads(disk, tier, self.agreement)
        promotion.when_idle = self.uploads.try_again
        self._kept_bytes = 0
        self._lock = threading.Lock()

    # -- reading ---------------------------------------------------------------------------------

    def open_all(
        self,
        wanted: Sequence[WantedKV],
        layout: KVLayout,
        first_s: Callable[[], float] | None = None,
    ) -> list[RemoteReader | None]:
        """See :meth:`RemoteTier.open_all`; leaves out what was not compared with this machine's own KV."""
        readers: list[RemoteReader | None] = [None] * len(wanted)
        usable = [at for at, each in enumerate(wanted) if each.namespace in self.agreement]
        found = self.tier.open_all([wanted[at] for at in usable], layout, first_s)
        for at, reader in zip(usable, found, strict=True):
            if reader is not None:
                reader.on_close = self._keep_later
                readers[at] = reader
        return readers

    def found(self, namespace: str, keys: Iterable[str], durable: bool) -> set[str]:
        """See :meth:`RemoteTier.found`; none if they were not compared with what this machine computes."""
        agrees = self.agreement.reach(namespace)
        return self.tier.found(namespace, keys, durable) if agrees else set()

    def _keep_later(self, reader: RemoteReader) -> bool:
        """Queue a chunk that was read, to be kept on the local disk and in memory; whether there was room."""
        size_bytes = reader.frame.file_bytes
        with self._lock:
            fits = self._kept_bytes + size_bytes <= KEPT_BYTES
            self._kept_bytes += size_bytes * fits
        if not fits:
            self._promotion.counters.add("drops")
            return False
        if self._promotion.submit(reader.namespace, reader.key, partial(self._keep, reader)):
            return True
        self._forget_kept(size_bytes)
        return False

    def _keep(self, reader: RemoteReader) -> None:
        entry = reader.namespace, reader.key
        try:
            with best_effort("a chunk from the remote was not kept on the local disk"):
                layers = reader.whole(self._promotion.left_s)
                self.uploads.note_known(*entry)
                if not self._disk.read_only:
                    self._disk.put_stored(*entry, reader.frame, reader.checksums, layers)
                arrays = [np.frombuffer(layer, dtype=np.uint8) for layer in layers]
                block = MemoryBlock(reader.layout, reader.tokens, arrays)
                self._promotion.insert(*entry, block)
        finally:
            self._forget_kept(reader.frame.file_bytes)
            reader.release()

    def _forget_kept(self, size_bytes: int) -> None:
        with self._lock:
            self._kept_bytes -= size_bytes

    # -- writing ---------------------------------------------------------------------------------

    def copy(self, namespace: str, key: str, waits: bool = True) -> bool:
        """See :meth:`Uploads.offer`; nothing is copied from a read-only store."""
        return self._disk.read_only or self.uploads.offer(namespace, key, waits=waits)

    def claim(self, namespace: str, keys: Iterable[str]) -> None:
        listed = sorted(set(keys))
        if self._disk.read_only or not listed:
            return
        gone = self.tier.claim(namespace, listed)
        if gone:
            self.uploads.forget_known(namespace, gone)
            raise StoreUnavailableError(
                f"{len(gone)} chunks are no longer in remote {self.tier.url} (blendrag store gc --remote?) "
                "or are damaged; run this again, which copies or computes them"
            )

    def ensure(self, namespace: str, keys: frozenset[str]) -> frozenset[str]:
        """Those of ``keys`` that are durable there, after copying what only this machine has.

        Raises :class:`StoreUnavailableError`.
        """
        if self._disk.read_only:
            raise StoreUnavailableError(
                f"store {self._disk.root} is read-only, expected one that copies its KV; open it for writing"
            )
        if not self.agreement.reach(namespace):
            raise StoreUnavailableError(
                self.tier.trouble
                or f"KV of remote {self.tier.url} was not compared with what this machine computes; ingest "
                "again with this remote"
            )
        durable = self.tier.durable(namespace, keys)
        copied = {key for key in keys - durable if self._disk.contains(namespace, key)}
        for key in sorted(copied):
            self.uploads.offer(namespace, key, is_missing=True)
        self.uploads.flush()
        return frozenset(durable | copied)

    def close(self) -> None:
        """Finish copies, end all requests. Idempotent."""
        self.uploads.close()
        self.tier.close()
