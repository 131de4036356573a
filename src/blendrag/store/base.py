"""The contract of a KV store: exactly the bytes that were put, or a miss; and what the tiers share.

Keys and namespaces are 64 lowercase hex digits (:mod:`blendrag.store.identity`).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

from blendrag.errors import InvalidInputError, StoreUnavailableError
from blendrag.store.kv import ChunkKV, KVLayout

if TYPE_CHECKING:
    import torch


@runtime_checkable
class KVReader(Protocol):
    """One chunk's KV opened for reading. It stays readable if the entry is evicted.

    May be used from one thread other than the opener's. Starts no threads of torch, so that a
    loader thread has no second OpenMP team: its only torch operators decode a block at a time.
    """

    key: str
    tokens: int
    tier: str
    """``"memory"``, ``"disk"`` or ``"remote"``: where the bytes come from."""

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        """Fill ``out`` ``[2, Hkv, T, D]`` with the verified bytes of ``layer``, decoded.

        ``out`` is a CPU tensor, often a strided view into a prompt's buffer: every
        ``out[kv, head]`` is contiguous ``[T, D]``, the rest need not be. Raises
        :class:`CorruptKVError` when the bytes are not those that were put, and
        :class:`StoreUnavailableError` when a remote gives none in time; ``out`` is then undefined and
        must not be used.
        """

    def is_cached(self) -> bool:
        """Whether reading needs no device access; ``True`` if the system cannot tell."""

    def close(self) -> None:
        """Release the file or reference. Idempotent."""


@runtime_checkable
class ResidentReader(KVReader, Protocol):
    """KV in memory where the model computes: the thread that computes copies it."""

    def copy_layer(self, layer: int, out: torch.Tensor) -> None:
        """Copy the KV of ``layer`` to ``out`` ``[2, Hkv, T, D]`` on the same device."""


@dataclass(frozen=True)
class TierStats:
    """One tier: what it holds now, and counters since it was opened."""

    tier: str
    entries: int
    size_bytes: int
    limit_bytes: int
    hits: int
    read_bytes: int
    """Bytes of verified layers that were read; on disk, including reads for promotion."""
    evictions: int


@dataclass(frozen=True)
class StoreStats:
    """What is stored now, and this process's counters since it opened the store."""

    entries: int
    size_bytes: int
    hits: int
    misses: int
    """Chunks that no tier had."""
    evictions: int
    quarantined: int
    puts: int = 0
    """Chunks written; putting one that exists does not count."""
    promotions: int = 0
    """Chunks copied from disk to memory."""
    queue_drops: int = 0
    """Chunks that stayed on disk or in the remote only, because the promotion queue was full."""
    uploads: int = 0
    """Chunks copied to the remote tier."""
    remote_failures: int = 0
    """Times the remote tier did not answer, or its bytes were not those that were put."""
    tiers: tuple[TierStats, ...] = ()
    """Fastest first."""


class PinScope:
    """Entries that may not be evicted while the scope lasts."""

    def __init__(self) -> None:
        self.held: set[tuple[str, str]] = set()

    def protect(self, namespace: str, key: str) -> None:
        """Also keep an entry that ``contains`` found and that is therefore not put again."""
        self.held.add((namespace, key))


class ForeignKVError(StoreUnavailableError):
    """The remote's KV of this model is not, or cannot be shown to be, what this machine computes."""


@dataclass(frozen=True)
class Probe:
    """What is compared with the remote; its key is :func:`blendrag.store.identity.probe_key`."""

    layout: KVLayout
    tokens: int
    compute: Callable[[], ChunkKV]
    """By the loaded model, as it would be put."""
    is_alike: Callable[[KVReader], bool]
    """Whether the model computes that KV, up to rounding. Raises :class:`CorruptKVError`."""


class KVStore(Protocol):
    """What the engine and the loader need of a store."""

    @property
    def read_only(self) -> bool:
        """Whether nothing can be stored: as requested, or because the directory is not writable."""

    def put(self, namespace: str, key: str, kv: ChunkKV) -> None:
        """Store ``kv`` in its layout's encoding. When this returns, the entry survives a crash.

        Putting a key again is a no-op. KV learned from prompts makes room for all other KV, and takes the
        place of none. Raises :class:`StoreFullError` when there is no room, :class:`InvalidInputError` for
        NaN or infinity.
        """

    def flush(self) -> None:
        """Block until everything that this thread put is in the remote tier too, if there is one.

        Raises :class:`StoreUnavailableError` if that fails.
        """

    def claim(self, namespace: str, keys: Iterable[str]) -> None:
        """Keep entries from being collected in a remote until they are published.

        Raises :class:`StoreUnavailableError`, also if one was collected meanwhile.
        """

    @property
    def is_behind(self) -> bool:
        """Whether :meth:`put` would wait for earlier copies to a remote."""

    def agrees(
        self, namespace: str, probe: Callable[[], Probe] | None = None, create: bool = False
    ) -> bool:
        """Whether a remote holds KV that this machine computes, too; its KV counts as absent until then.

        ``True`` without a remote. See :meth:`blendrag.store.remote.agreement.Agreement.reach`.
        """

    def expect(
        self,
        namespace: str,
        layout: KVLayout,
        wanted: Iterable[tuple[str, int]],
        first_s: Callable[[], float] | None = None,
    ) -> None:
        """Say which keys a prompt will open now, with their tokens, so that a remote is asked for all at once
        and the prompt gets its own time to wait for it: ``first_s()`` seconds for the first bytes of all."""

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

    @property
    def trouble(self) -> str:
        """Why a part of the store is not asked at the moment; empty if all of it is."""

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> KVReader | None:
        """Reader of that entry, or ``None`` if it is absent or anything about it is in doubt.

        ``layout`` and ``tokens`` come from the model and the prompt and are compared with the
        file. Numbers found in a file are never computed with.
        """

    def contains(self, namespace: str, key: str) -> bool:
        """Whether there is a durable entry. Its bytes are verified when they are read."""

    def contains_here(self, namespace: str, key: str) -> bool:
        """Whether the entry is on this machine. Does not wait for a remote."""

    def contained(self, namespace: str, keys: Iterable[str]) -> set[str]:
        """:meth:`contains` for several keys, for which a remote is asked at once."""

    def found(self, namespace: str, keys: Iterable[str]) -> set[str]:
        """Those of ``keys`` that can probably be opened, for a request that waits: a remote is asked for all
        at once."""

    def delete(self, namespace: str, key: str) -> bool:
        """Remove an entry; whether there was one."""

    def keys(self, namespace: str) -> Iterator[str]:
        """Keys of one namespace in the store's directory, in no particular order.

        Raises :class:`StoreUnavailableError` if any of them cannot be listed.
        """

    def pin_scope(self) -> AbstractContextManager[PinScope]:
        """Entries that this thread puts while the scope lasts are not evicted to make room for others.

        Ingest runs in a scope: when only its own entries are left to evict, ``put`` raises
        :class:`StoreFullError`. Readers need no pin, because an open file survives eviction.
        """

    def pin(self, namespace: str, key: str) -> None:
        """Never evict this entry, whether it is there or put later, until it is deleted.

        Survives reopening. Its bytes count against the limit, so pin only a few small entries.
        """

    def learned_limit_bytes(self) -> int:
        """Bytes that KV learned from prompts may take on disk.

        A share of what the limit, and the space that the disk really has, allow; never the place of other KV.
        """

    def give_up_learned(self, size_bytes: int) -> bool:
        """Remove KV learned from prompts, as much as frees ``size_bytes``; whether there was any."""

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Finish background work and release the store. Idempotent."""


class Counters:
    """Named counters of one tier since it was opened. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def stats(self, tier: str, entries: int, size_bytes: int, limit_bytes: int) -> StoreStats:
        """The statistics of a store that consists of this tier."""
        count, hits, evictions = self._counts, self["hits"], self["evictions"]
        held = TierStats(
            tier, entries, size_bytes, limit_bytes, hits, count["read_bytes"], evictions
        )
        misses, quarantined, puts = count["misses"], count["quarantined"], count["puts"]
        return StoreStats(
            entries, size_bytes, hits, misses, evictions, quarantined, puts, tiers=(held,)
        )


class ProcessBound:
    """An object that belongs to the process that made it: neither copied, pickled nor used in a fork."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that made the object."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raise :class:`InvalidInputError` in a forked process, where locks and threads are missing."""
        if self.is_inherited:
            raise InvalidInputError(
                f"this {type(self).__name__} was opened in process {self._pid}, from which this one "
                f"({os.getpid()}) was forked; open the store again here, or start processes by spawn"
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidInputError(
            f"an open {type(self).__name__} cannot be copied or sent to another process; send its "
            "path and open it there"
        )
