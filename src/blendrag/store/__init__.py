"""The KV store: chunk key → that chunk's KV cache, exactly the bytes that were put, or a miss.

``base`` holds the contract, ``disk`` and ``memory`` a tier each, ``tiered`` the one over the other.
"""

from __future__ import annotations

from pathlib import Path

from blendrag.store.base import KVReader, KVStore, PinScope, StoreStats
from blendrag.store.disk import DiskStore
from blendrag.store.memory import MemoryStore
from blendrag.store.root import DEFAULT_DISK_BYTES
from blendrag.store.tiered import TieredStore

__all__ = [
    "DEFAULT_DISK_BYTES",
    "DiskStore",
    "KVReader",
    "KVStore",
    "MemoryStore",
    "PinScope",
    "StoreStats",
    "TieredStore",
    "open_store",
]


def open_store(
    root: Path | str,
    ram_bytes: int,
    disk_bytes: int | None,
    read_only: bool = False,
    default_disk_bytes: int = DEFAULT_DISK_BYTES,
) -> KVStore:
    """Open the store at ``root``, created if need be: ``ram_bytes`` of memory over ``disk_bytes``.

    The store remembers its ``disk_bytes``. ``None`` takes what it remembers, or else
    ``default_disk_bytes``. Raises :class:`StoreUnavailableError` when the directory cannot be used.
    """
    disk = DiskStore(Path(root), disk_bytes, read_only, default_disk_bytes)
    return TieredStore(MemoryStore(ram_bytes), disk)
