"""A put against writing the same bytes durably by hand: write, fsync, rename."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from blendrag.lab.bench.store_chunks import DISK_BYTES, NAMESPACE, key_of, stored
from blendrag.lab.bench.store_rounds import MeasuredNothingError, Row, Tick, Way, measure
from blendrag.store import KVStore, open_store
from blendrag.store.kv import ChunkKV
from blendrag.store.payload import frame, layer_checksum
from blendrag.store.tensor_bytes import tensor_buffer


class _Settled(Way):
    """What is timed begins with nothing left over from before: the journal of most file systems is
    one for all, and whoever syncs first writes (and, mounted with ``discard``, trims) for everybody."""

    def __init__(self, directory: Path) -> None:
        self._settling = directory / "settling"

    def prepare(self) -> None:
        fd = os.open(self._settling, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(fd, secrets.token_bytes(16))
            os.fsync(fd)
        finally:
            os.close(fd)


class Puts(_Settled):
    """:meth:`KVStore.put` of a chunk that is not there."""

    name = "store"

    def __init__(self, directory: Path, store: KVStore, chunk: ChunkKV) -> None:
        super().__init__(directory)
        self._store, self._chunk = store, chunk
        self._number = 0
        self.size_bytes = frame(chunk.layout, chunk.tokens).file_bytes

    def prepare(self) -> None:
        self._number += 1
        super().prepare()

    def run(self) -> None:
        self._store.put(NAMESPACE, key_of(self._number), self._chunk)

    def check(self) -> None:
        if not stored(self._store, self._number, self._chunk):
            raise MeasuredNothingError(
                "a chunk that was put does not come back, expected the same bytes; "
                "the disk or this installation cannot be trusted"
            )

    def finish(self) -> None:
        self._store.delete(NAMESPACE, key_of(self._number))


class PlainWrites(_Settled):
    """The payload's bytes, written, synced and renamed into place; no directory is synced."""

    name = "write+fsync+rename"

    def __init__(self, directory: Path, chunk: ChunkKV) -> None:
        directory.mkdir()
        super().__init__(directory)
        self._temporary, self._final = directory / "temporary", directory / "final"
        self._buffers = [_header(chunk), *map(tensor_buffer, chunk.layers)]
        self.size_bytes = sum(len(buffer) for buffer in self._buffers)

    def run(self) -> None:
        fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for buffer in self._buffers:
                os.write(fd, buffer)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(self._temporary, self._final)

    def check(self) -> None:
        if self._final.read_bytes() != b"".join(map(bytes, self._buffers)):
            raise MeasuredNothingError(
                "a file does not hold what was written to it, expected the same bytes; "
                "choose another --dir"
            )

    def finish(self) -> None:
        for path in (self._temporary, self._final):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def measure_puts(root: Path, chunk: ChunkKV, rounds: int, tick: Tick) -> list[Row]:
    """Both ways, on the file system of ``root``."""
    root.mkdir()
    store = open_store(root / "store", ram_bytes=0, disk_bytes=DISK_BYTES)
    try:
        ways = [Puts(root, store, chunk), PlainWrites(root / "plain", chunk)]
        return measure("put", ways, rounds, tick, PlainWrites.name)
    finally:
        store.close()


def _header(chunk: ChunkKV) -> bytes:
    key = secrets.token_hex(32)
    sums = [layer_checksum(key, i, tensor_buffer(x)) for i, x in enumerate(chunk.layers)]
    return frame(chunk.layout, chunk.tokens).header(NAMESPACE, key, sums)
