"""Where the KV of a measurement comes from: memory, disk, a disk without page cache, or a throttled disk.

A throttled read is the store's own verified read from a warm disk that returns no earlier than a device of
that throughput would deliver. All readers of a store share the device.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blendrag.errors import InvalidInputError
from blendrag.lab.bench.rounds import Name, Tick, Timing, milliseconds, run_rounds
from blendrag.lab.bench.scratch import scratch
from blendrag.planning.profile import COLD, DISK, MEMORY
from blendrag.planning.tier_times import COLD_SHARE, cached_share
from blendrag.store import KVReader, KVStore, open_store
from blendrag.store.encodings import stored_layer_bytes
from blendrag.store.kv import KVLayout
from blendrag.store.tiered import TieredStore

#: A limit that no workload reaches; the free space of the disk still applies.
AMPLE_BYTES = 1 << 40
#: Names of tiers → their names in a profile, which their readers report too.
TIERS = {"memory": MEMORY, "disk": DISK, "cold": COLD}
#: The slowest device that is simulated; from a slower one, reading KV takes hours.
MIN_BYTES_PER_S = 1e3
_SPEED = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([kmgt]?)b/s\s*", re.IGNORECASE)


@dataclass(frozen=True)
class BenchTier:
    """One of :data:`TIERS`, or a disk of ``bytes_per_s``, whose name is its throughput."""

    name: str
    bytes_per_s: float | None = None

    @property
    def profiled(self) -> str:
        """Its name in a profile."""
        return TIERS.get(self.name, self.name)


ON_DISK = BenchTier("disk")


def parse_tier(text: str) -> BenchTier:
    """``"memory"``, ``"disk"``, ``"cold"`` or ``"0.5GB/s"``; raises :class:`InvalidInputError`."""
    if text in TIERS:
        return BenchTier(text)
    bytes_per_s = _throughput(text)
    if not 0 < bytes_per_s < float("inf"):
        raise InvalidInputError(
            f"tier {text!r} is none of {', '.join(TIERS)}; expected one of them or a throughput such as "
            "0.5GB/s"
        )
    if bytes_per_s < MIN_BYTES_PER_S:
        raise InvalidInputError(
            f"tier {text!r} is slower than any disk, expected a throughput of 1 KB/s or more; check its unit"
        )
    return BenchTier(text.strip(), bytes_per_s)


def _throughput(text: str) -> float:
    """Bytes per second of a text such as ``500 MB/s``; 0 for anything else."""
    match = _SPEED.fullmatch(text)
    return float(match[1]) * 1000 ** "_KMGT".index(match[2].upper() or "_") if match else 0.0


def drop_cached(paths: Iterable[Path]) -> None:
    """Write these files to disk and ask the system to drop them from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


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

    def __init__(
        self, reader: KVReader, layout: KVLayout, device: Throttle, tier: str | None = None
    ) -> None:
        """``tier`` is the name it reports; by default the reader's."""
        self._reader, self._layout, self._device = reader, layout, device
        self.key, self.tokens, self.tier = reader.key, reader.tokens, tier or reader.tier

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        """See :meth:`KVReader.read_layer`."""
        delivered = self._device.begin(stored_layer_bytes(self._layout, layer, self.tokens))
        self._reader.read_layer(layer, out)
        left_s = delivered - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)

    def is_cached(self) -> bool:
        """See :meth:`KVReader.is_cached`."""
        return self._reader.is_cached()

    def close(self) -> None:
        """See :meth:`KVReader.close`."""
        self._reader.close()


class ThrottledStore:
    """A :class:`KVStore` with throttled reads."""

    def __init__(self, store: KVStore, device: Throttle, tier: str | None = None) -> None:
        self._store, self._device, self._tier = store, device, tier

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> KVReader | None:
        """See :meth:`KVStore.open`."""
        reader = self._store.open(namespace, key, layout, tokens)
        return reader and ThrottledReader(reader, layout, self._device, self._tier)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class TierStore:
    """A temporary store of one tier, and what puts its KV into that tier."""

    def __init__(self, tier: BenchTier, store: KVStore, root: Path) -> None:
        self.tier = tier
        self.store = store
        self._root = root

    def settle(self) -> None:
        """After the first use of all KV: wait until it is in memory, if it goes there."""
        if isinstance(self.store, TieredStore):
            self.store.drain()

    def prepare(self, name: object = None) -> None:
        """Before every measurement, outside its time: drop a cold tier's files from the page cache.

        Raises :class:`InvalidInputError` if the system keeps them.
        """
        if self.tier.name != "cold":
            return
        files = [path for path in (self._root / "kv").rglob("*") if path.is_file()]
        drop_cached(files)
        left = cached_share(files)
        if left > COLD_SHARE:
            raise InvalidInputError(
                f"tier cold cannot be measured in {self._root.parent}: {left:.0%} of the files stay in the "
                "page cache; set TMPDIR to a directory on a disk"
            )

    def time_ways(
        self,
        ways: Mapping[Name, Callable[[], object]],
        rounds: int,
        device: torch.device,
        tick: Tick,
    ) -> dict[Name, Timing]:
        """Milliseconds of each way over rounds from this tier."""
        timed = {name: partial(milliseconds, way, device) for name, way in ways.items()}
        samples = run_rounds(timed, rounds, tick, self.prepare, self.settle)
        return {name: Timing.of(ms) for name, ms in samples.items()}


@contextmanager
def tier_store(tier: BenchTier, limit_bytes: int = AMPLE_BYTES) -> Iterator[TierStore]:
    """A temporary store of at most ``limit_bytes``."""
    with scratch() as directory:
        root = directory / "store"
        ram_bytes = limit_bytes if tier.name == "memory" else 0
        store = open_store(root, ram_bytes=ram_bytes, disk_bytes=limit_bytes)
        try:
            given: Any = store
            if tier.bytes_per_s is not None:
                given = ThrottledStore(store, Throttle(tier.bytes_per_s), tier.profiled)
            yield TierStore(tier, given, root)
        finally:
            store.close()
