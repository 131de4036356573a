"""The contract of a KV store tier: exactly the bytes that were put, or a miss.

One tier per file beside this one. A key is 64 lowercase hex digits (:func:`identity.chunk_key`), a
namespace likewise (:attr:`identity.ModelIdentity.namespace`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from blendrag.store.kv import ChunkKV, KVLayout

if TYPE_CHECKING:
    import torch


@runtime_checkable
class KVReader(Protocol):
    """One chunk's KV opened for reading; stays readable when the entry is evicted meanwhile.

    Safe to use from one thread other than the opener. Starts no threads of torch's, so that a loader
    thread has no second OpenMP team: no operators but those that decode, on a block at a time.
    """

    key: str
    tokens: int
    tier: str
    """``"memory"`` or ``"disk"``: where the bytes come from."""

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        """Fill ``out`` ``[2, Hkv, T, D]`` with the verified bytes of ``layer``, decoded.

        ``out`` is a CPU tensor, often a strided view into a prompt's buffer: every
        ``out[kv, head]`` is contiguous ``[T, D]``, the rest need not be. Raises
        :class:`CorruptKVError` when the bytes are not those that were put; ``out`` is then
        undefined and must not be used.
        """

    def close(self) -> None:
        """Release the file or reference. Idempotent."""


@dataclass(frozen=True)
class TierStats:
    """One tier: what it holds now, and counters since it was opened."""

    tier: str
    """``"memory"`` or ``"disk"``."""
    entries: int
    size_bytes: int
    limit_bytes: int
    hits: int
    read_bytes: int
    """Bytes of layers that were read and are good; on disk, those read for promotion included."""
    evictions: int


@dataclass(frozen=True)
class StoreStats:
    """What is stored now, and counters since open, of one process."""

    entries: int
    size_bytes: int
    hits: int
    misses: int
    """Opened in vain, in every tier."""
    evictions: int
    quarantined: int
    puts: int = 0
    """Chunks written; one that was there already is none."""
    promotions: int = 0
    """Chunks taken from disk into memory."""
    queue_drops: int = 0
    """Chunks that stayed on disk only, because too many were waiting to be promoted."""
    tiers: tuple[TierStats, ...] = ()
    """Fastest first."""


class PinScope(Protocol):
    """Entries that may not be evicted for as long as the scope lasts."""

    def protect(self, namespace: str, key: str) -> None:
        """Keep this entry, too: one that ``contains`` found and that is therefore not put again."""


class KVStore(Protocol):
    """What the engine and the loader need of a store."""

    @property
    def read_only(self) -> bool:
        """Whether nothing can be stored: asked for, or found out when the store was opened."""

    def put(self, namespace: str, key: str, kv: ChunkKV) -> None:
        """Store ``kv``, encoded as its layout says; when this returns, it survives a crash.

        Putting a key again is a no-op.
        Raises :class:`StoreFullError` when there is no room, :class:`InvalidInputError` for
        NaN/Inf.
        """

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> KVReader | None:
        """Reader of that entry, or ``None``: absent, or anything about it in doubt.

        ``layout`` and ``tokens`` come from the model and the prompt and are compared with what the
        file says; numbers found in a file are never computed with.
        """

    def contains(self, namespace: str, key: str) -> bool:
        """Whether there is an entry, durable as ``put`` makes it; its bytes are verified on read."""

    def delete(self, namespace: str, key: str) -> bool:
        """Drop an entry; whether there was one."""

    def keys(self, namespace: str) -> Iterator[str]:
        """Keys of one namespace, in no particular order.

        Raises :class:`StoreUnavailableError` rather than leave out what cannot be listed.
        """

    def pin_scope(self) -> AbstractContextManager[PinScope]:
        """Entries put while the scope lasts are never evicted to make room for others.

        Ingest runs in one: when only its own entries are left to evict, ``put`` raises
        :class:`StoreFullError` instead. Readers need no pin: an open file survives eviction.
        """

    def pin(self, namespace: str, key: str) -> None:
        """Never evict this entry, here yet or put later, until it is deleted; survives reopening.

        Its bytes count against the limit all the same, so this is for a few small entries.
        """

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Drain background writes and release the store. Idempotent."""
