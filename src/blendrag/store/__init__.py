"""The KV store: chunk key → that chunk's KV cache, exactly the bytes that were put, or a miss.

The tiers are imported on first use (PEP 562), because they import torch, which :mod:`.maintenance` does not
need.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blendrag.store.base import KVReader, PinScope, StoreStats
from blendrag.store.root import DEFAULT_DISK_BYTES

if TYPE_CHECKING:
    from blendrag.store.disk import DiskStore
    from blendrag.store.memory import MemoryStore
    from blendrag.store.remote.tier import RemoteTier
    from blendrag.store.tiered import KVStore

__all__ = [
    "DEFAULT_DISK_BYTES",
    "DiskStore",
    "KVReader",
    "KVStore",
    "MemoryStore",
    "PinScope",
    "StoreStats",
    "open_store",
]

_LAZY = {"DiskStore": "disk", "MemoryStore": "memory", "KVStore": "tiered"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'blendrag.store' has no attribute {name!r}")


def open_store(
    root: Path | str,
    ram_bytes: int,
    disk_bytes: int | None,
    read_only: bool = False,
    remote: Callable[[], RemoteTier] | None = None,
) -> KVStore:
    """Open or create the store at ``root``: ``ram_bytes`` of memory over ``disk_bytes`` of disk.

    ``remote`` opens a tier below them that other machines share.

    The store remembers ``disk_bytes``. ``None`` takes the remembered limit, or else
    :data:`DEFAULT_DISK_BYTES`. Raises :class:`StoreUnavailableError` when the directory cannot be used.
    """
    from blendrag.store.disk import DiskStore
    from blendrag.store.memory import MemoryStore
    from blendrag.store.tiered import KVStore

    disk = DiskStore(Path(root), disk_bytes, read_only)
    try:
        return KVStore(MemoryStore(ram_bytes), disk, remote() if remote is not None else None)
    except BaseException:
        disk.close()
        raise
