"""Layers of several chunks into a prompt's buffers: the store, and what else could have read them.

All ways fill the same buffers, in the order of a query: layer by layer, every chunk. Files are opened
before the clock starts, as a query does. The store and raw ``preadv`` read the same payload files, as
does safetensors: a payload is a safetensors file. ``torch.load`` has a file per chunk and layer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from blendrag.lab.bench.store_chunks import DISK_BYTES, NAMESPACE, Prompt, key_of
from blendrag.lab.bench.store_cold import drop
from blendrag.lab.bench.store_rounds import MeasuredNothingError, Row, Tick, Way, measure
from blendrag.planning.tier_times import cached_share
from blendrag.store import KVReader, MemoryStore, open_store
from blendrag.store.payload import frame
from blendrag.store.tensor_bytes import target_buffers


class ReadWay(Way):
    """Fills a prompt's buffers."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.size_bytes = prompt.size_bytes
        self.cold = False
        self.cached_share = 1.0
        """Of what a cold round is about to read, the largest share that was in the page cache."""

    def files(self) -> list[Path]:
        """What is read."""
        raise NotImplementedError

    def open(self) -> None:
        """Open what is read; the page cache is emptied afterwards, if it is."""

    def prepare(self) -> None:
        self.prompt.clear()
        self.open()
        if self.cold:
            drop(self.files())
            self.cached_share = max(self.cached_share, cached_share(self.files()))

    def check(self) -> None:
        if not self.prompt.holds_all():
            raise MeasuredNothingError(
                f"{self.name} left other bytes in the buffers than were put, expected the same; "
                "the disk or this installation cannot be trusted"
            )


class StoreReads(ReadWay):
    """What a query calls, of any tier: verified layers."""

    def __init__(self, name: str, prompt: Prompt, store: Any, files: list[Path]) -> None:
        super().__init__(prompt)
        self.name = name
        self._store = store
        self._files = files
        self._readers: list[KVReader] = []

    def files(self) -> list[Path]:
        return self._files

    def open(self) -> None:
        for number, chunk in enumerate(self.prompt.chunks):
            reader = self._store.open(NAMESPACE, key_of(number), chunk.layout, chunk.tokens)
            if reader is None:
                raise MeasuredNothingError(
                    f"{self.name} does not find what was put, expected all chunks; "
                    "choose another --dir"
                )
            self._readers.append(reader)

    def run(self) -> None:
        for layer, targets in enumerate(self.prompt.targets):
            for reader, target in zip(self._readers, targets, strict=True):
                reader.read_layer(layer, target)

    def finish(self) -> None:
        for reader in self._readers:
            reader.close()
        self._readers = []


class RawReads(ReadWay):
    """``preadv`` of the same bytes into the same memory: nothing parsed, nothing verified."""

    name = "raw preadv"

    def __init__(self, prompt: Prompt, files: list[Path]) -> None:
        super().__init__(prompt)
        first = prompt.chunks[0]
        self._files = files
        self._fds: list[int] = []
        offsets = frame(first.layout, first.tokens).offsets
        self._plan = [
            [(number, _buffers(target), offset) for number, target in enumerate(targets)]
            for targets, offset in zip(prompt.targets, offsets[:-1], strict=True)
        ]

    def files(self) -> list[Path]:
        return self._files

    def open(self) -> None:
        self._fds = [os.open(path, os.O_RDONLY) for path in self._files]

    def run(self) -> None:
        fds = self._fds
        for layer in self._plan:
            for number, buffers, offset in layer:
                os.preadv(fds[number], buffers, offset)

    def finish(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class TorchLoads(ReadWay):
    """``torch.load`` of a file per chunk and layer, copied into place."""

    name = "torch.load"

    def __init__(self, prompt: Prompt, directory: Path) -> None:
        super().__init__(prompt)
        directory.mkdir()
        self._paths = [
            [directory / f"{layer:04d}-{number:04d}.pt" for number in range(len(prompt.chunks))]
            for layer in range(len(prompt.targets))
        ]
        for layer, paths in enumerate(self._paths):
            for path, chunk in zip(paths, prompt.chunks, strict=True):
                torch.save(chunk.layers[layer], path)

    def files(self) -> list[Path]:
        return [path for paths in self._paths for path in paths]

    def run(self) -> None:
        for paths, targets in zip(self._paths, self.prompt.targets, strict=True):
            for path, target in zip(paths, targets, strict=True):
                target.copy_(torch.load(path, weights_only=True))


class SafeOpens(ReadWay):
    """safetensors' ``safe_open``, a mapping of the file; each layer a tensor, copied into place."""

    name = "safe_open"

    def __init__(self, prompt: Prompt, files: list[Path]) -> None:
        super().__init__(prompt)
        self._files = files
        self._stack = contextlib.ExitStack()
        self._opened: list[Any] = []

    def files(self) -> list[Path]:
        return self._files

    def open(self) -> None:
        self._opened = [
            self._stack.enter_context(safe_open(path, framework="pt")) for path in self._files
        ]

    def run(self) -> None:
        for layer, targets in enumerate(self.prompt.targets):
            name = f"l{layer:04d}"
            for opened, target in zip(self._opened, targets, strict=True):
                target.copy_(opened.get_tensor(name))

    def finish(self) -> None:
        self._opened = []
        self._stack.close()


@contextlib.contextmanager
def reading_ways(root: Path, prompt: Prompt) -> Iterator[list[ReadWay]]:
    """Every way, over files written below ``root``. The memory tier is the last."""
    store = open_store(root / "store", ram_bytes=0, disk_bytes=DISK_BYTES)
    memory = MemoryStore(prompt.size_bytes)
    try:
        for number, chunk in enumerate(prompt.chunks):
            store.put(NAMESPACE, key_of(number), chunk)
            memory.put(NAMESPACE, key_of(number), chunk)
        files = [_payload(root / "store", number) for number in range(len(prompt.chunks))]
        yield [
            StoreReads("store", prompt, store, files),
            RawReads(prompt, files),
            TorchLoads(prompt, root / "torch"),
            SafeOpens(prompt, files),
            StoreReads("memory tier", prompt, memory, []),
        ]
    finally:
        memory.close()
        store.close()


def measure_reads(root: Path, prompt: Prompt, rounds: int, tick: Tick) -> tuple[list[Row], float]:
    """Warm and cold rows, and the share of pages that were cached where none should be."""
    with reading_ways(root, prompt) as ways:
        rows = measure("warm read", ways, rounds, tick, RawReads.name)
        from_disk = [way for way in ways if way.files()]
        for way in from_disk:
            way.cold, way.cached_share = True, 0.0
        rows += measure("cold read", from_disk, rounds, tick, RawReads.name, warm_up=False)
        return rows, max(way.cached_share for way in from_disk)


def _buffers(target: torch.Tensor) -> list[memoryview]:
    shape = (target.shape[0], target.shape[1], target.shape[2], target.shape[3])
    return target_buffers(target, shape, target.dtype)


def _payload(store: Path, number: int) -> Path:
    (path,) = store.glob(f"kv/{NAMESPACE}/*/{key_of(number)}.*.kv")
    return path
