"""What reading costs: from memory, from disk, from any directory, and from host to device.

Owns a scratch store of its own in the directory that is measured: the real tiers, their checksums and
decoding, over chunks of the model's own KV; the store that is in use gains nothing. Layers are read as
the loader reads them, layer by layer of all chunks, into buffers such as a prompt's.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from blendrag.errors import InvalidInputError, StoreError
from blendrag.planning.page_cache import forget
from blendrag.planning.profile import COLD, DISK, MEMORY, Tier
from blendrag.store import DiskStore, KVReader, MemoryStore
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.kv import ChunkKV, KVLayout

#: Bytes read at a time, about, if so many chunks are not too many.
READ_BYTES = 64 << 20
MAX_CHUNKS = 8
ROUNDS = 3
SCRATCH = ".profile-"
#: A scratch directory this old is left over from a process that was killed.
STALE_S = 3600.0
COPIED_BYTES = 64 << 20


@dataclass(frozen=True)
class Reading:
    """One way of reading, timed: ``reads`` layers of chunks, in ``seconds``, ``busy_s`` of them on a core."""

    size_bytes: int
    reads: int
    seconds: float
    busy_s: float


def tier_of(name: str, readings: Sequence[Reading]) -> Tier:
    """Throughput and cost of a read, from a reading of long chunks and one of short ones.

    Long chunks take what they took; of that, reads are at most half: times that differ by chance alone
    would else make a tier of endless throughput.
    """
    long, short = sorted(readings, key=lambda each: -each.size_bytes)
    spread = long.size_bytes / long.reads - short.size_bytes / short.reads
    byte_s = (long.seconds / long.reads - short.seconds / short.reads) / spread if spread else 0.0
    whole = long.seconds / long.size_bytes
    byte_s = min(max(byte_s, whole / 2), whole)
    busy = sum(each.busy_s for each in readings) / sum(each.seconds for each in readings)
    return Tier(name, 1 / byte_s, (whole - byte_s) * long.size_bytes / long.reads, min(1.0, busy))


def measure_memory(kvs: Sequence[ChunkKV], pinned: bool) -> Tier:
    """The memory tier; ``kvs`` are a long chunk and a short one, laid out as the store keeps them."""
    readings = []
    for kv in kvs:
        count = _count(kv.layout, kv.tokens)
        store = MemoryStore(2 * count * stored_chunk_bytes(kv.layout, kv.tokens) + 1)
        with contextlib.closing(store):
            _fill(store.put, kv, count)
            readings.append(_median(store.open, kv, count, pinned))
    return tier_of(MEMORY, readings)


def measure_store(root: Path, kvs: Sequence[ChunkKV], pinned: bool) -> tuple[Tier, ...]:
    """The disk tier of the store at ``root``; see :func:`measure_directory`."""
    return measure_directory(root, kvs, pinned, DISK, COLD, "--store")


def measure_directory(
    directory: Path,
    kvs: Sequence[ChunkKV],
    pinned: bool,
    name: str,
    cold_name: str,
    option: str = "--dir",
) -> tuple[Tier, ...]:
    """The disk tier in ``directory``: with its files in the operating system's cache, and without, unless
    some of them stay there whatever it is told.

    Raises :class:`InvalidInputError` for a directory that cannot be written, which ``option`` named;
    :class:`StoreFullError`.
    """
    warm, cold = [], []
    is_cold = True
    for kv in kvs:
        count = _count(kv.layout, kv.tokens)
        scratch_of = _scratch(directory, option)
        with scratch_of as scratch, contextlib.closing(DiskStore(scratch, None)) as store:
            _fill(store.put, kv, count)
            files = [path for path in (scratch / "kv").rglob("*") if path.is_file()]
            is_cold = is_cold and forget(files)
            if is_cold:
                cold.append(_median(store.open, kv, count, pinned, partial(forget, files)))
            warm.append(_median(store.open, kv, count, pinned))
    found = tier_of(name, warm)
    return (found, tier_of(cold_name, cold)) if is_cold else (found,)


def measure_device(device: torch.device) -> float | None:
    """Bytes per second from pinned host memory to ``device``; ``None`` where that is the host."""
    if device.type != "cuda":
        return None
    there = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    times = []
    for _ in range(1 + ROUNDS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return COPIED_BYTES / statistics.median(times[1:])


# -- the pieces -----------------------------------------------------------------------------------

Open = Callable[[str, str, KVLayout, int], KVReader | None]
NAMESPACE = hashlib.sha256(b"profile").hexdigest()


def _key(number: int) -> str:
    return hashlib.sha256(f"profile {number}".encode()).hexdigest()


def _count(layout: KVLayout, tokens: int) -> int:
    return max(2, min(MAX_CHUNKS, READ_BYTES // stored_chunk_bytes(layout, tokens)))


def _fill(put: Callable[[str, str, ChunkKV], None], kv: ChunkKV, count: int) -> None:
    for number in range(count):
        put(NAMESPACE, _key(number), kv)


def _median(
    open_: Open, kv: ChunkKV, count: int, pinned: bool, before: Callable[[], object] = lambda: None
) -> Reading:
    """The median of some rounds, after one that is not counted."""
    found = []
    for _ in range(1 + ROUNDS):
        before()
        found.append(_read(open_, kv, count, pinned))
    return sorted(found[1:], key=lambda each: each.seconds)[ROUNDS // 2]


def _read(open_: Open, kv: ChunkKV, count: int, pinned: bool) -> Reading:
    targets = _targets(kv, count, pinned)
    readers = [open_(NAMESPACE, _key(number), kv.layout, kv.tokens) for number in range(count)]
    try:
        began, worked = time.perf_counter(), time.thread_time()
        for layer, row in enumerate(targets):
            for reader, target in zip(readers, row, strict=True):
                if reader is None:
                    raise StoreError("a chunk written a moment ago cannot be read; profile again")
                reader.read_layer(layer, target)
        seconds, busy_s = time.perf_counter() - began, time.thread_time() - worked
    finally:
        for reader in readers:
            if reader is not None:
                reader.close()
    size = count * stored_chunk_bytes(kv.layout, kv.tokens)
    return Reading(size, count * len(targets), seconds, min(busy_s, seconds))


def _targets(kv: ChunkKV, count: int, pinned: bool) -> list[list[torch.Tensor]]:
    """Per layer, where each chunk goes: fresh memory, as a prompt's buffers are, or pinned staging."""
    rows = []
    for layer in range(len(kv.layout.layers)):
        two, heads, tokens, width = kv.layout.layer_shape(layer, kv.tokens)
        dtype = kv.layout.torch_dtype
        if pinned:
            shape = (two, heads, tokens, width)
            rows.append([torch.empty(shape, dtype=dtype, pin_memory=True) for _ in range(count)])
            continue
        buffer = torch.empty((two, heads, count * tokens, width), dtype=dtype)
        rows.append([buffer[:, :, i * tokens : (i + 1) * tokens] for i in range(count)])
    return rows


@contextlib.contextmanager
def _scratch(directory: Path, option: str) -> Iterator[Path]:
    """A directory in ``directory`` that is gone afterwards, and others' that should have been."""
    try:
        for left in directory.glob(f"{SCRATCH}*"):
            if left.is_dir() and time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=directory))
    except OSError as exc:
        raise InvalidInputError(
            f"directory {directory} cannot be written ({exc.strerror}), expected one in which reading can "
            f"be timed; choose another {option}"
        ) from exc
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


__all__ = [
    "Reading",
    "measure_device",
    "measure_directory",
    "measure_memory",
    "measure_store",
    "tier_of",
]
