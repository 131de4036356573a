"""Where the KV of a measurement comes from: memory, disk, a disk without page cache, or a throttled disk.

A throttled read is the store's own verified read from a warm disk that returns no earlier than a device of
that throughput would deliver. All readers of a store share the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blendrag.errors import InvalidInputError
from blendrag.option import parse_size
from blendrag.planning.tier_times import cached_share, drop_cached
from blendrag.store.base import KVReader, WantedKV
from blendrag.store.encodings import stored_bytes_by_layer
from blendrag.store.kv import KVLayout
from blendrag.store.tiered import KVStore, open_store
from blendrag_lab.bench.scratch import scratch

#: A limit that no workload reaches; the free space of the disk still applies.
AMPLE_BYTES = 1 << 40
TIERS = ("memory", "disk", "cold")
#: The slowest device that is simulated; from a slower one, reading KV takes hours.
MIN_BYTES_PER_S = 1000


@dataclass(frozen=True)
class BenchTier:
    """One of :data:`TIERS`, or a disk of ``bytes_per_s``, whose name is its throughput."""

    name: str
    bytes_per_s: float | None = None


ON_DISK = BenchTier("disk")


def parse_tier(text: str) -> BenchTier:
    """``"memory"``, ``"disk"``, ``"cold"`` or ``"0.5GB/s"``; raises :class:`InvalidInputError`."""
    if text in TIERS:
        return BenchTier(text)
    size, per, rest = text.strip().lower().partition("b/s")
    try:
        bytes_per_s = parse_size(size) if per and not rest else 0
    except ValueError:
        bytes_per_s = 0
    if bytes_per_s < MIN_BYTES_PER_S:
        raise InvalidInputError(
            f"tier {text!r} is none of {', '.join(TIERS)}; expected one of them or a throughput of 1KB/s or "
            "more, such as 0.5GB/s"
        )
    return BenchTier(text.strip(), bytes_per_s)


class Throttle:
    """A device that delivers ``bytes_per_s``, one read after the other. Thread-safe."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def begin(self, size_bytes: int) -> float:
        """When a read that starts now will be delivered, in seconds of ``time.perf_counter()``."""
        with self._lock:
            begins = max(time.perf_counter(), self._free_at)
            self._free_at = begins + size_bytes / self._bytes_per_s
            return self._free_at


class ThrottledReader:
    """A :class:`KVReader` that reads stored bytes of ``layout`` through ``device``."""

    def __init__(self, reader: KVReader, layout: KVLayout, device: Throttle, tier: str) -> None:
        """``tier`` is the name it reports."""
        self._reader, self._layout, self._device = reader, layout, device
        self.tier = tier

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        delivered = self._device.begin(stored_bytes_by_layer(self._layout, self.tokens)[layer])
        self._reader.read_layer(layer, out)
        time.sleep(max(0.0, delivered - time.perf_counter()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class ThrottledStore:
    """A :class:`KVStore` with throttled reads."""

    def __init__(self, store: KVStore, device: Throttle, tier: str) -> None:
        self._store, self._device, self._tier = store, device, tier

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> Any:
        reader = self._store.open(namespace, key, layout, tokens)
        return reader and ThrottledReader(reader, layout, self._device, self._tier)

    def open_all(self, wanted: Sequence[WantedKV], layout: KVLayout, *first_s: Any) -> list[Any]:
        return [self.open(namespace, key, layout, tokens) for namespace, key, tokens in wanted]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class TierStore:
    """A temporary store of one tier, and what puts its KV into that tier."""

    def __init__(self, tier: BenchTier, store: Any, root: Path) -> None:
        self.tier = tier
        self.store = store
        self._root = root

    def prepare(self) -> None:
        """Before every measurement: wait for KV that goes to memory; drop a cold tier from the page cache."""
        self.store.drain()
        if self.tier.name != "cold":
            return
        files = [path for path in (self._root / "kv").rglob("*") if path.is_file()]
        if not drop_cached(files):
            raise InvalidInputError(
                f"tier cold cannot be measured in {self._root.parent}: {cached_share(files):.0%} of the "
                "files stay in the page cache; set TMPDIR to a directory on a disk"
            )


@contextmanager
def tier_store(tier: BenchTier) -> Iterator[TierStore]:
    with scratch() as directory:
        root = directory / "store"
        ram_bytes = AMPLE_BYTES if tier.name == "memory" else 0
        with closing(open_store(root, ram_bytes=ram_bytes, disk_bytes=AMPLE_BYTES)) as store:
            given: Any = store
            if tier.bytes_per_s is not None:
                given = ThrottledStore(store, Throttle(tier.bytes_per_s), tier.name)
            yield TierStore(tier, given, root)
