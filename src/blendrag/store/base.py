"""What the tiers of a store and its readers share.

Keys and namespaces are 64 lowercase hex digits (:mod:`blendrag.store.identity`).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Protocol, runtime_checkable

from blendrag.errors import InvalidInputError, StoreUnavailableError
from blendrag.store.kv import ChunkKV, KVLayout

if TYPE_CHECKING:
    import torch


#: Where KV is.
Place = Literal["memory", "disk", "remote"]


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
        """Whether reading from disk needs no device access; ``True`` if the system cannot tell."""

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
        """Also keep an entry that is there and therefore not put again."""
        self.held.add((namespace, key))


class ForeignKVError(StoreUnavailableError):
    """The remote's KV of this model is not, or cannot be shown to be, what this machine computes."""


@dataclass(frozen=True)
class Probe:
    """What is compared with the remote; its key is :func:`blendrag.store.identity.probe_key`."""

    layout: KVLayout
    tokens: int
    compute: Callable[[], ChunkKV]
    """Computes its KV with the loaded model, as it would be put."""
    is_alike: Callable[[KVReader], bool]
    """Whether the model computes that KV, up to rounding. Raises :class:`CorruptKVError`."""


class WantedKV(NamedTuple):
    """An entry that is to be opened, and how many tokens it must have."""

    namespace: str
    key: str
    tokens: int


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
