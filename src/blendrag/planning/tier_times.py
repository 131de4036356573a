"""What reading costs: from memory, from disk, from any directory, from a remote, and from host to device.

Reads chunks of the model's own KV as the loader does, from a scratch store that is removed afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from blendrag.errors import InvalidInputError, StoreError
from blendrag.planning.profile import MEMORY, REMOTE, Tier
from blendrag.store.base import KVReader, WantedKV
from blendrag.store.disk import DiskStore
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.kv import ChunkKV
from blendrag.store.memory import MemoryStore
from blendrag.store.remote.root import name_of
from blendrag.store.remote.tier import RemoteTier

#: Bytes read at a time, about, from 2 to :data:`MAX_CHUNKS` chunks.
READ_BYTES = COPIED_BYTES = 64 << 20
MAX_CHUNKS = 8
ROUNDS = 3
SCRATCH = ".profile-"
NAMESPACE = "0" * 64
KEYS = [f"{number:064x}" for number in range(MAX_CHUNKS)]


class Reading(NamedTuple):
    """One timed reading: ``reads`` layers of chunks, ``busy_s`` of the seconds on a core."""

    size_bytes: int
    reads: int
    seconds: float
    busy_s: float


def tier_of(name: str, readings: Sequence[Reading]) -> Tier:
    """Throughput and latency from a reading of long chunks and one of short ones.

    Latency is at most half of the time for long chunks, or noise could make throughput infinite.
    """
    long, short = sorted(readings, key=lambda each: -each.size_bytes)
    spread = long.size_bytes / long.reads - short.size_bytes / short.reads
    byte_s = (long.seconds / long.reads - short.seconds / short.reads) / spread if spread else 0.0
    whole = long.seconds / long.size_bytes
    byte_s = min(max(byte_s, whole / 2), whole)
    busy = sum(each.busy_s for each in readings) / sum(each.seconds for each in readings)
    return Tier(name, 1 / byte_s, (whole - byte_s) * long.size_bytes / long.reads, min(1.0, busy))


def measure_memory(kvs: Sequence[ChunkKV], pinned: bool) -> Tier:
    """The memory tier. ``kvs``: a long and a short chunk, laid out as the store keeps them."""
    readings = []
    for kv in kvs:
        size_bytes = 2 * _count(kv) * stored_chunk_bytes(kv.layout, kv.tokens) + 1
        with contextlib.closing(MemoryStore(size_bytes)) as store:
            _fill(store, kv)
            readings.append(_median(store, kv, pinned))
    return tier_of(MEMORY, readings)


def measure_directory(
    directory: Path, kvs: Sequence[ChunkKV], pinned: bool, names: tuple[str, str] | None = None
) -> tuple[Tier, ...]:
    """The disk tier in ``directory``: with its files in the page cache, and without if they can be dropped.

    ``names``: of these two tiers; else they are named after the directory. Raises
    :class:`InvalidInputError` for a directory that cannot be written; :class:`StoreFullError`.
    """
    resolved = directory.expanduser().resolve()
    name, cold_name = names or (str(resolved), f"{resolved} (cold)")
    warm, cold = [], []
    for kv in kvs:
        with (
            scratch_directory(directory, "--store" if names else "--dir") as scratch,
            contextlib.closing(DiskStore(scratch, None)) as store,
        ):
            _fill(store, kv)
            files = [path for path in (scratch / "kv").rglob("*") if path.is_file()]
            if drop_cached(files):
                cold.append(_median(store, kv, pinned, partial(drop_cached, files)))
            warm.append(_median(store, kv, pinned))
    found = tier_of(name, warm)
    return (found, tier_of(cold_name, cold)) if len(cold) == len(warm) else (found,)


def measure_remote(remote: RemoteTier, kvs: Sequence[ChunkKV], pinned: bool) -> Tier:
    """The remote tier, through a namespace of its own that is removed afterwards.

    Raises :class:`StoreError` if the remote does not answer in time.
    """
    readings = []
    for kv in kvs:
        namespace, keys = secrets.token_hex(32), KEYS[: _count(kv)]
        with (
            tempfile.TemporaryDirectory() as scratch,
            contextlib.closing(DiskStore(Path(scratch), None)) as local,
        ):
            try:
                for key in keys:
                    local.put(namespace, key, kv)
                    payload = local.payload(namespace, key)
                    assert payload is not None
                    with payload as found:
                        remote.put(*found)
                readings.append(_median(remote, kv, pinned, namespace=namespace))
            finally:
                with contextlib.suppress(StoreError):
                    for key in keys:
                        remote.objects.delete(name_of(namespace, key))
    return tier_of(REMOTE, readings)


def measure_device(device: torch.device) -> float | None:
    """Bytes per second from pinned host memory to ``device``; ``None`` if that is the host."""
    if device.type != "cuda":
        return None
    on_device = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    times = []
    for _ in range(1 + ROUNDS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        on_device.copy_(on_host, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return COPIED_BYTES / statistics.median(times[1:])


# -- reading ------------------------------------------------------------------------------------------


def _count(kv: ChunkKV) -> int:
    return max(2, min(MAX_CHUNKS, READ_BYTES // stored_chunk_bytes(kv.layout, kv.tokens)))


def _fill(store: DiskStore | MemoryStore, kv: ChunkKV) -> None:
    for key in KEYS[: _count(kv)]:
        store.put(NAMESPACE, key, kv)


def _median(
    store: DiskStore | MemoryStore | RemoteTier,
    kv: ChunkKV,
    pinned: bool,
    before: Callable[[], object] = lambda: None,
    namespace: str = NAMESPACE,
) -> Reading:
    """The median of some rounds, after one to warm up."""
    found = []
    for _ in range(1 + ROUNDS):
        before()
        found.append(_read(store, kv, pinned, namespace))
    return sorted(found[1:], key=lambda each: each.seconds)[ROUNDS // 2]


def _read(
    store: DiskStore | MemoryStore | RemoteTier, kv: ChunkKV, pinned: bool, namespace: str
) -> Reading:
    """Read each layer of each chunk into fresh memory, like a prompt's buffers."""
    count, layers, dtype = _count(kv), len(kv.layout.layers), kv.layout.torch_dtype
    shapes = [kv.layout.layer_shape(layer, count * kv.tokens) for layer in range(layers)]
    buffers = [torch.empty(shape, dtype=dtype, pin_memory=pinned) for shape in shapes]
    targets = [buffer.split(kv.tokens, dim=2) for buffer in buffers]  # [2, Hkv, T, D] each
    with contextlib.ExitStack() as opened:
        readers = []
        began, worked = time.perf_counter(), time.thread_time()
        found: Sequence[KVReader | None]
        if isinstance(store, RemoteTier):
            wanted = [WantedKV(namespace, key, kv.tokens) for key in KEYS[:count]]
            found = store.open_all(wanted, kv.layout)
        else:
            found = [store.open(namespace, key, kv.layout, kv.tokens) for key in KEYS[:count]]
        for reader in found:
            if reader is None:
                raise StoreError("a chunk written a moment ago cannot be read; profile again")
            readers.append(opened.enter_context(contextlib.closing(reader)))
        if not isinstance(store, RemoteTier):  # there, opening a chunk reads its first layers
            began, worked = time.perf_counter(), time.thread_time()
        for layer, row in enumerate(targets):
            for reader, target in zip(readers, row, strict=True):
                reader.read_layer(layer, target)
        seconds, busy_s = time.perf_counter() - began, time.thread_time() - worked
    size_bytes = count * stored_chunk_bytes(kv.layout, kv.tokens)
    return Reading(size_bytes, count * layers, seconds, min(busy_s, seconds))


@contextlib.contextmanager
def scratch_directory(directory: Path, option: str) -> Iterator[Path]:
    """A temporary directory in ``directory``."""
    try:
        made = tempfile.TemporaryDirectory(prefix=SCRATCH, dir=directory)
    except OSError as exc:
        raise InvalidInputError(
            f"directory {directory} cannot be written ({exc.strerror}), expected one in which reading can "
            f"be timed; choose another {option}"
        ) from exc
    with made as scratch:
        yield Path(scratch)


# -- the page cache -------------------------------------------------------------------------------

#: Share of pages that may be left in the cache of files that count as dropped.
COLD_SHARE = 0.02
#: Attempts to drop them: another process may be reading.
TRIES = 3


def drop_cached(files: Sequence[Path]) -> bool:
    """Drop files from the operating system's page cache; whether they are gone.

    Pages that are not on the disk yet cannot be dropped, so files are synced first. ``posix_fadvise`` is
    only advice (tmpfs ignores it), so ``mincore`` counts what is left.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for _ in range(TRIES):
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with contextlib.suppress(OSError, AttributeError):
            if cached_share(files) <= COLD_SHARE:
                return True
    return False


def cached_share(files: Sequence[Path]) -> float:
    """Share of the files' pages that are in the page cache, in [0, 1]. Raises :class:`OSError`."""
    pages = b"".join(map(_resident, files))
    return sum(page & 1 for page in pages) / len(pages) if pages else 0.0


def _resident(path: Path) -> bytes:
    """A byte for every page of a file; its lowest bit is set if the page is in the page cache."""
    size_bytes = path.stat().st_size
    if not size_bytes:
        return b""
    found = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        first = ctypes.c_ubyte.from_buffer(mapping)
        try:
            address = ctypes.c_void_p(ctypes.addressof(first))
            if libc.mincore(address, ctypes.c_size_t(size_bytes), found):
                raise OSError(ctypes.get_errno(), "mincore", str(path))
        finally:
            del first  # a mapping with pointers into it cannot be closed
    return bytes(found)
