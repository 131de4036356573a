"""``blendrag bench store``: the KV store against raw I/O: reads, puts, misses and decoding.

Each part measures its ways in rounds and checks the result of every round. KV is random, because time
depends on shapes only. No model is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import torch
import typer
from safetensors import safe_open

from blendrag.cli.options import Remote
from blendrag.config import settings
from blendrag.errors import InvalidInputError
from blendrag.planning.tier_times import cached_share, drop_cached
from blendrag.store.base import WantedKV
from blendrag.store.encodings import RELATIVE_ERROR, stored_chunk_bytes
from blendrag.store.encodings.codec import codec_of, staging_of
from blendrag.store.index import Index
from blendrag.store.kv import ChunkKV, KVLayout, LayerShape
from blendrag.store.memory import MemoryStore
from blendrag.store.payload import frame, layer_checksum
from blendrag.store.payload_files import new_name
from blendrag.store.remote.objects import WRITE_S
from blendrag.store.remote.root import name_of
from blendrag.store.remote.tier import RemoteReader, RemoteTier, request_ahead, requests_of
from blendrag.store.tensor_bytes import Shape, target_buffers, tensor_buffer
from blendrag.store.tiered import KVStore, open_store
from blendrag_lab.bench import options
from blendrag_lab.bench.geometry import config_of
from blendrag_lab.bench.rounds import (
    MeasuredNothingError,
    Tick,
    Timing,
    WayRow,
    measure_part,
    seconds_of,
    silent,
)
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.bench.tiers import AMPLE_BYTES
from blendrag_lab.tables import NOTHING, ResultTable, table, times

NAMESPACE = hashlib.sha256(b"blendrag bench store").hexdigest()
#: Missing keys that are looked up, one after the other.
GETS = 2000
BATCH_ROWS = 100_000
#: Decoding is compared with reading from a common NVMe disk.
DISK_BYTES_PER_S = 2e9
#: Relative rounding error of bfloat16, which decoded numbers have too.
BF16_ERROR = 2**-8
OTHER_BYTES = (
    "has other bytes than were written, expected the same; the disk or this installation cannot be "
    "trusted"
)


@dataclass(frozen=True)
class StoreResult:
    """One run; times in milliseconds per round, sizes in bytes."""

    directory: str
    layers: int
    chunks: int
    layer_bytes: int
    rounds: int
    cold_cached_share: float
    """Largest share of pages that a cold read found in the page cache."""
    rows: tuple[WayRow, ...]


def store_table(result: StoreResult) -> ResultTable:
    return table(
        [
            ("part", lambda row: row.part),
            ("way", lambda row: row.way),
            ("ms (lowest to highest)", lambda row: str(row.ms)),
            ("speed", lambda row: NOTHING if row.speed is None else times(row.speed)),
        ],
        result.rows,
        f"{result.chunks} × {result.layers} layers of {result.layer_bytes / 1024:.0f} KiB, "
        f"{result.directory}, {result.rounds} rounds",
    )


@options.bench(store_table)
def store(
    geometry: options.Geometry = None,
    tokens: options.Count = 512,
    chunks: options.Count = 6,
    rows: Annotated[
        int, options.number("Rows of the index in which a key is missing.", 1, kind=int)
    ] = 1_000_000,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A directory on the disk to measure.")
    ] = None,
    remote: Remote = None,
    rounds: options.Rounds = 7,
    tick: Tick = silent,
) -> StoreResult:
    layout = layout_of(geometry)
    directory = directory or Path(tempfile.gettempdir())
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise InvalidInputError(
            f"--dir {directory} is not a writable directory; name one on the disk to measure"
        )
    with scratch(directory) as root:
        tick("making chunks")
        kvs = [random_chunk(layout, tokens, seed) for seed in range(chunks)]
        found, share = measure_reads(root / "reads", kvs, rounds, tick)
        if remote is not None:
            found += measure_remote_reads(root / "remote", remote, kvs, rounds, tick)
        found += measure_puts(root / "puts", kvs[0], rounds, tick)
        found += measure_decoding(kvs[0], rounds, tick)
        found += measure_misses(root / "misses", rows, layout, tokens, tick)
    return StoreResult(
        directory=str(directory),
        layers=len(layout.layers),
        chunks=chunks,
        layer_bytes=layout.layer_bytes(0, tokens),
        rounds=rounds,
        cold_cached_share=share,
        rows=tuple(found),
    )


def layout_of(geometry: str | None) -> KVLayout:
    """KV of a geometry, by default layers of 0.5 MiB for 512 tokens."""
    layers, heads, dim = 24, 2, 128
    if geometry is not None:
        config = config_of(geometry)
        layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
        dim = config["hidden_size"] // config["num_attention_heads"]
    return KVLayout((LayerShape(heads, dim),) * layers, "bfloat16")


def random_chunk(layout: KVLayout, tokens: int, seed: int) -> ChunkKV:
    generator = torch.Generator().manual_seed(seed)
    shapes = [layout.layer_shape(i, tokens) for i in range(len(layout.layers))]
    layers = [torch.randn(s, generator=generator).to(layout.torch_dtype) for s in shapes]
    return ChunkKV(layout, tokens, layers)


def new_key() -> str:
    return secrets.token_hex(32)


Read = Callable[[int, int, torch.Tensor], object]
"""Reads a layer of the chunk with that number to a target ``[2, Hkv, T, D]``."""
Opened = Callable[[], AbstractContextManager[Read]]
"""Opens the files, before the time starts, as a query does."""


class PromptBuffers:
    """Chunks by key, and buffers for all of them, one per layer: ``[2, Hkv, chunks · T, D]``."""

    def __init__(self, chunks: Mapping[str, ChunkKV]) -> None:
        self.chunks = chunks
        self.first = next(iter(chunks.values()))
        self.size_bytes = sum(chunk.size_bytes for chunk in chunks.values())
        self.buffers = [torch.zeros_like(x).repeat(1, 1, len(chunks), 1) for x in self.first.layers]
        self.targets = [buffer.split(self.first.tokens, dim=2) for buffer in self.buffers]
        """By layer and chunk, views ``[2, Hkv, T, D]``."""

    def fill(self, name: str, opened: Opened, before: Callable[[], object] = lambda: None) -> float:
        """Seconds to read layer by layer, every chunk, as a query does; ``before()`` runs after opening.

        Raises :class:`MeasuredNothingError` unless all chunks are then in place, bit for bit.
        """
        for buffer in self.buffers:
            buffer.zero_()
        with opened() as read:

            def run() -> None:
                for layer, targets in enumerate(self.targets):
                    for number, target in enumerate(targets):
                        read(layer, number, target)

            before()
            seconds = seconds_of(run)
        for layer, targets in enumerate(self.targets):
            for target, chunk in zip(targets, self.chunks.values(), strict=True):
                if not torch.equal(target, chunk.layers[layer]):
                    raise MeasuredNothingError(f"layer {layer}, read by {name}, {OTHER_BYTES}")
        return seconds


@contextlib.contextmanager
def store_reads(prompt: PromptBuffers, kv_store: KVStore | MemoryStore) -> Iterator[Read]:
    """Verified layers of any tier. Raises :class:`MeasuredNothingError` for a chunk that is not there."""
    with contextlib.ExitStack() as stack:
        readers = []
        for key, chunk in prompt.chunks.items():
            reader = kv_store.open(NAMESPACE, key, chunk.layout, chunk.tokens)
            if reader is None:
                raise MeasuredNothingError(
                    "the store does not find a chunk that was put, expected a hit; choose another --dir"
                )
            readers.append(stack.enter_context(contextlib.closing(reader)))
        yield lambda layer, number, target: readers[number].read_layer(layer, target)


@contextlib.contextmanager
def raw_reads(prompt: PromptBuffers, files: Sequence[Path]) -> Iterator[Read]:
    """``preadv`` of the same bytes to the same memory: nothing parsed, nothing verified."""
    offsets = frame(prompt.first.layout, prompt.first.tokens).offsets
    buffers = [
        [target_buffers(x, cast(Shape, tuple(x.shape)), x.dtype) for x in targets]
        for targets in prompt.targets
    ]
    with contextlib.ExitStack() as stack:
        fds = [stack.enter_context(path.open("rb")).fileno() for path in files]
        yield lambda layer, number, _: os.preadv(
            fds[number], buffers[layer][number], offsets[layer]
        )


@contextlib.contextmanager
def safe_opens(files: Sequence[Path]) -> Iterator[Read]:
    """safetensors' ``safe_open``, a mapping of the payload; each layer is copied into place."""
    with contextlib.ExitStack() as stack:
        opened: list[Any] = [stack.enter_context(safe_open(f, framework="pt")) for f in files]
        yield lambda layer, number, target: target.copy_(opened[number].get_tensor(f"l{layer:04d}"))


@contextlib.contextmanager
def reading_ways(
    root: Path, prompt: PromptBuffers
) -> Iterator[dict[str, tuple[Opened, Sequence[Path]]]]:
    """Every way, with the files that it reads. ``torch.load`` reads a file per layer and chunk."""
    disk = open_store(root / "store", ram_bytes=0, disk_bytes=AMPLE_BYTES)
    memory = MemoryStore(prompt.size_bytes)
    saved = root / "torch"
    saved.mkdir()
    with contextlib.closing(disk), contextlib.closing(memory):
        files: list[Path] = []
        for number, (key, chunk) in enumerate(prompt.chunks.items()):
            disk.put(NAMESPACE, key, chunk)
            memory.put(NAMESPACE, key, chunk)
            files += (root / "store").glob(f"kv/{NAMESPACE}/*/{key}.*.kv")
            for layer, tensor in enumerate(chunk.layers):
                torch.save(tensor, saved / f"{layer}-{number}.pt")

        def torch_load(layer: int, number: int, target: torch.Tensor) -> None:
            target.copy_(torch.load(saved / f"{layer}-{number}.pt", weights_only=True))

        yield {
            "store": (partial(store_reads, prompt, disk), files),
            "raw preadv": (partial(raw_reads, prompt, files), files),
            "torch.load": (lambda: contextlib.nullcontext(torch_load), list(saved.iterdir())),
            "safe_open": (partial(safe_opens, files), files),
            "memory tier": (partial(store_reads, prompt, memory), []),
        }


def measure_reads(
    root: Path, chunks: Sequence[ChunkKV], rounds: int, tick: Tick
) -> tuple[list[WayRow], float]:
    """Warm and cold rows, and the largest share of pages that were cached in cold rounds."""
    prompt = PromptBuffers({new_key(): chunk for chunk in chunks})
    cached: list[float] = []

    def drop(files: Sequence[Path]) -> None:
        drop_cached(files)
        cached.append(cached_share(files))

    warm, cold = {}, {}
    with reading_ways(root, prompt) as ways:
        for name, (opened, files) in ways.items():
            warm[name] = partial(prompt.fill, name, opened)
            if files:
                cold[name] = partial(prompt.fill, name, opened, partial(drop, files))
        rows = measure_part("warm read", warm, rounds, tick, "raw preadv")
        rows += measure_part("cold read", cold, rounds, tick, "raw preadv", warm_up=False)
    return rows, max(cached)


def remote_reads(prompt: PromptBuffers, remote: RemoteTier) -> float:
    """Through the remote tier as a prompt reads it, into the prompt's buffers, verified.

    Opening is in the time, because it reads the first layers.
    """

    @contextlib.contextmanager
    def opened() -> Iterator[Read]:
        readers: list[Any] = []

        def read(layer: int, number: int, target: torch.Tensor) -> None:
            if not readers:
                readers.extend(_opened(prompt, remote))
            readers[number].read_layer(layer, target)

        try:
            yield read
        finally:
            for reader in readers:
                reader.close()

    return prompt.fill("the remote tier", opened)


def _opened(prompt: PromptBuffers, remote: RemoteTier) -> list[RemoteReader]:
    wanted = [WantedKV(NAMESPACE, key, chunk.tokens) for key, chunk in prompt.chunks.items()]
    readers = remote.open_all(wanted, prompt.first.layout)
    found = [reader for reader in readers if reader is not None]
    if len(found) < len(readers):
        raise MeasuredNothingError(
            "the remote does not find a chunk that was put, expected a hit; choose another --remote"
        )
    request_ahead(found)
    return found


def obstore_alone(prompt: PromptBuffers, remote: RemoteTier) -> float:
    """The same ranges by obstore itself, as many requests at a time; nothing verified, nothing copied."""
    import obstore

    expected = frame(prompt.first.layout, prompt.first.tokens)
    offsets, names = expected.offsets, [name_of(NAMESPACE, key) for key in prompt.chunks]
    seals = remote.seals.size_bytes(len(offsets) - 1)
    opened, requests = remote.objects.opened, requests_of(expected)

    async def read_all() -> list[Any]:
        turns = asyncio.Semaphore(remote.objects.in_flight)

        async def read(name: str, layers: range) -> Any:
            begin = seals + offsets[layers.start] if layers.start else 0
            async with turns:
                found = await obstore.get_range_async(
                    opened, name, start=begin, end=seals + offsets[layers.stop]
                )
                # asyncio takes 3 ms to hand a MiB of obstore's own type on
                return memoryview(found)

        return await asyncio.gather(*(read(name, layers) for layers in requests for name in names))

    found: list[Any] = []
    seconds = seconds_of(lambda: found.extend(asyncio.run(read_all())))
    chunks = list(prompt.chunks.values())
    for number, data in enumerate(found):
        at, chunk = divmod(number, len(chunks))
        layers = [bytes(tensor_buffer(chunks[chunk].layers[layer])) for layer in requests[at]]
        if not bytes(data).endswith(b"".join(layers)):
            raise MeasuredNothingError(f"layers {requests[at]}, read by obstore, {OTHER_BYTES}")
    return seconds


def measure_remote_reads(
    root: Path, url: str, chunks: Sequence[ChunkKV], rounds: int, tick: Tick
) -> list[WayRow]:
    """Reading all layers from the remote; the objects are removed afterwards."""
    remote = RemoteTier(url, settings().remote_key, WRITE_S)
    prompt = PromptBuffers({new_key(): chunk for chunk in chunks})
    with contextlib.closing(remote):
        try:
            tick("remote read: putting")
            with contextlib.closing(open_store(root, 0, AMPLE_BYTES)) as local:
                for name, chunk in prompt.chunks.items():
                    local.put(NAMESPACE, name, chunk)
                    with local.disk.payload(NAMESPACE, name) or _gone() as found:
                        remote.put(*found)
            ways = {
                "remote tier": partial(remote_reads, prompt, remote),
                "obstore alone": partial(obstore_alone, prompt, remote),
            }
            return measure_part("remote read", ways, rounds, tick, "obstore alone")
        finally:
            remote.objects.delete(*(name_of(NAMESPACE, name) for name in prompt.chunks))


def _gone() -> NoReturn:
    raise MeasuredNothingError("a chunk that was put is gone, expected it; choose another --dir")


def _settle(directory: Path) -> None:
    """Sync a small file, so that no earlier write is synced within the time: most file systems share one
    journal."""
    with (directory / "settling").open("wb", buffering=0) as file:
        file.write(secrets.token_bytes(16))
        os.fsync(file.fileno())


def store_put(directory: Path, kv_store: KVStore, chunk: ChunkKV) -> float:
    """:meth:`KVStore.put` of a new chunk."""
    key = new_key()
    prompt = PromptBuffers({key: chunk})
    _settle(directory)
    try:
        seconds = seconds_of(lambda: kv_store.put(NAMESPACE, key, chunk))
        prompt.fill("the store", partial(store_reads, prompt, kv_store))
        return seconds
    finally:
        kv_store.delete(NAMESPACE, key)


def plain_write(directory: Path, header: bytes, chunk: ChunkKV) -> float:
    """The payload's bytes, written, synced and renamed into place; no directory is synced."""
    buffers = [header, *map(tensor_buffer, chunk.layers)]
    temporary, final = directory / "temporary", directory / "final"

    def run() -> None:
        with temporary.open("xb", buffering=0) as file:
            for buffer in buffers:
                file.write(buffer)
            os.fsync(file.fileno())
        temporary.rename(final)

    _settle(directory)
    try:
        seconds = seconds_of(run)
        if final.read_bytes() != b"".join(map(bytes, buffers)):
            raise MeasuredNothingError(f"a plain file {OTHER_BYTES}")
        return seconds
    finally:
        for path in (temporary, final):
            path.unlink(missing_ok=True)


def putting_ways(
    directory: Path, kv_store: KVStore, chunk: ChunkKV
) -> dict[str, Callable[[], float]]:
    key = new_key()
    sums = [layer_checksum(key, i, tensor_buffer(x)) for i, x in enumerate(chunk.layers)]
    header = frame(chunk.layout, chunk.tokens).header(NAMESPACE, key, sums)
    return {
        "store": partial(store_put, directory, kv_store, chunk),
        "write+fsync+rename": partial(plain_write, directory, header, chunk),
    }


def measure_puts(root: Path, chunk: ChunkKV, rounds: int, tick: Tick) -> list[WayRow]:
    root.mkdir()
    with contextlib.closing(open_store(root / "store", 0, AMPLE_BYTES)) as kv_store:
        ways = putting_ways(root, kv_store, chunk)
        return measure_part("put", ways, rounds, tick, "write+fsync+rename")


def decode(chunk: ChunkKV) -> float:
    """Decode every layer of a chunk from int8 through the buffer of a reader. Only decoding is timed."""
    layout = chunk.layout.encoded("int8")
    codec, staging = codec_of(layout), staging_of(layout, chunk.tokens)
    assert codec is not None
    assert staging is not None
    encoded = [codec.encode(i, layer) for i, layer in enumerate(chunk.layers)]
    decoded = [torch.zeros_like(layer) for layer in chunk.layers]
    seconds = began = 0.0

    def fill(stored: torch.Tensor, room: Any) -> None:
        nonlocal began
        ctypes.memmove(room, stored.data_ptr(), stored.numel())
        began = time.perf_counter()

    for layer, (stored, out) in enumerate(zip(encoded, decoded, strict=True)):
        staging.read(layer, partial(fill, stored), out)
        seconds += time.perf_counter() - began
    for layer, (expected, out) in enumerate(zip(chunk.layers, decoded, strict=True)):
        bound = expected.float().abs().max().item() * (2 * RELATIVE_ERROR["int8"] + BF16_ERROR)
        error = (out.float() - expected.float()).abs().max().item()
        if not error <= bound:
            raise MeasuredNothingError(
                f"layer {layer} decoded from int8 is off by {error:.3g}, expected at most "
                f"{bound:.3g}; this installation cannot be trusted"
            )
    return seconds


def measure_decoding(chunk: ChunkKV, rounds: int, tick: Tick) -> list[WayRow]:
    """Decoding int8, and the read that its smaller payload saves (computed)."""
    (decoded,) = measure_part("decode", {"int8": partial(decode, chunk)}, rounds, tick)
    saved = chunk.size_bytes - stored_chunk_bytes(chunk.layout.encoded("int8"), chunk.tokens)
    ms = saved / DISK_BYTES_PER_S * 1e3
    return [
        replace(decoded, speed=ms / decoded.ms.median),
        WayRow("decode", "read saved by int8", Timing(ms, ms, ms), 1.0),
    ]


def miss(kv_store: KVStore, layout: KVLayout, tokens: int) -> float:
    key, before = new_key(), kv_store.stats().misses
    found: list[object] = []
    seconds = seconds_of(lambda: found.append(kv_store.open(NAMESPACE, key, layout, tokens)))
    if found != [None] or kv_store.stats().misses != before + 1:
        raise MeasuredNothingError(
            "a key that was never put was found, or was not looked up, expected a miss; this installation "
            "cannot be trusted"
        )
    return seconds


def measure_misses(
    root: Path, rows: int, layout: KVLayout, tokens: int, tick: Tick
) -> list[WayRow]:
    """Gets in a store of ``rows`` chunks, with a memory tier as an engine has."""
    open_store(root, 0, AMPLE_BYTES).close()
    fill_index(root / "index", rows, tick)
    with contextlib.closing(open_store(root, 1 << 30, AMPLE_BYTES)) as kv_store:
        entries = kv_store.stats().entries
        if entries != rows:
            raise MeasuredNothingError(
                f"the index has {entries} rows, expected {rows}; choose another --dir"
            )
        tick("miss: looking up")
        ways = {"store": partial(miss, kv_store, layout, tokens)}
        return measure_part("miss", ways, GETS, silent)


def fill_index(directory: Path, rows: int, tick: Tick) -> None:
    """Add that many rows without payloads to the index of a closed store."""
    insert = "INSERT INTO payload (namespace, key, nonce, size_bytes) VALUES (?, ?, ?, 1)"
    index = Index(directory)
    with contextlib.closing(index), index.exclusive():
        index.open()
        for first in range(0, rows, BATCH_ROWS):
            tick(f"miss: {first:,} of {rows:,} rows")
            numbers = range(first, min(first + BATCH_ROWS, rows))
            with index.transaction() as database:
                keys = (hashlib.sha256(b"%d" % number).hexdigest() for number in numbers)
                database.executemany(insert, (new_name(NAMESPACE, key) for key in keys))
        index.sync()
