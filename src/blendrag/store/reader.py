"""One payload file opened for reading: layers on demand, each verified before it is used."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash

from blendrag.errors import CorruptKVError
from blendrag.store.encodings.codec import staging_of
from blendrag.store.kv import KVLayout
from blendrag.store.payload import Frame, layer_seed
from blendrag.store.tensor_bytes import target_buffers

#: The kernel takes at most this many buffers in one preadv.
IOV_MAX = 1024
#: Read at once before it is summed up, so that the checksum reads from the second-level cache. A layer
#: of 2 MiB that is read whole and then summed up would come from memory a second time.
PORTION_BYTES = 512 << 10


class LayerReader:
    """What the readers of all tiers share: layers as they are stored, decoded into a prompt."""

    def __init__(self, key: str, layout: KVLayout, tokens: int) -> None:
        self.key = key
        self.layout = layout
        self.tokens = tokens
        self.on_close: Callable[[Any], bool] | None = None
        """Takes over a reader that was read, or is wanted, when it is closed; whether it did."""
        self.is_wanted = False
        """Whether the chunk is kept although no layer was read."""
        self._staging = staging_of(layout, tokens)
        self._lock = threading.Lock()
        self._was_read = self._failed = self._closed = False

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        """See :meth:`KVReader.read_layer`. Runs no torch operator except to decode."""
        if self._closed:
            raise self.closed_error()
        shape = self.layout.layer_shape(layer, self.tokens)
        dtype, is_state = self.layout.layer_dtype(layer), self.layout.layers[layer].is_state
        targets = target_buffers(out, shape, dtype)  # refuses what does not fit
        try:
            if self._staging is None or is_state:
                self.read_stored(layer, targets)
            else:
                self._staging.read(
                    layer, lambda room: self.read_stored(layer, [memoryview(room).cast("B")]), out
                )
        except BaseException:
            self._failed = True
            raise
        self._was_read = True

    def read_stored(self, layer: int, buffers: list[memoryview]) -> None:
        """Fill writable buffers of bytes with the layer's verified stored bytes."""
        raise NotImplementedError

    def is_cached(self) -> bool:
        return True

    def close(self) -> None:
        """Release it, or hand it over. Idempotent; waits for a read in progress."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        is_kept = self.is_wanted or (self._was_read and not self._failed)
        if not (is_kept and self.on_close is not None and self.on_close(self)):
            self.release()

    def release(self) -> None:
        """Free what it holds. Idempotent."""
        raise NotImplementedError

    def closed_error(self) -> ValueError:
        return ValueError(f"reader of {self.key[:12]}… is closed")


class DiskReader(LayerReader):
    """Reads a chunk's layers with ``preadv`` straight into the prompt's buffers.

    Encoded layers are read into a buffer of this reader and decoded from there once verified. An
    eviction or rename meanwhile changes nothing, because the descriptor stays open. There is no mmap:
    a file truncated after open would kill the process with SIGBUS; a short read can be handled.
    """

    tier = "disk"

    def __init__(
        self,
        fd: int,
        key: str,
        layout: KVLayout,
        tokens: int,
        frame: Frame,
        checksums: list[int],
        on_corrupt: Callable[[str], None],
        on_read: Callable[[int], None],
    ) -> None:
        """``on_corrupt`` gets what is wrong with the file, ``on_read`` the bytes of each verified layer."""
        super().__init__(key, layout, tokens)
        self._fd = fd
        self._frame = frame
        self._checksums = checksums
        self._on_corrupt = on_corrupt
        self._on_read = on_read

    def read_stored(self, layer: int, buffers: list[memoryview]) -> None:
        with self._lock:
            if self._fd < 0:
                raise self.closed_error()
            fault = self._fill(layer, buffers)
        if fault is not None:
            self._on_corrupt(fault)
            raise CorruptKVError(
                f"stored KV {self.key[:12]}… layer {layer}: {fault}; "
                "the chunk is set aside and counts as a miss"
            )
        begin, end = self._frame.offsets[layer : layer + 2]
        self._on_read(end - begin)

    def _fill(self, layer: int, buffers: list[memoryview]) -> str | None:
        """Read and verify; returns what is wrong with the file, if anything. Caller holds the lock."""
        offset, end = self._frame.offsets[layer : layer + 2]
        digest = xxhash.xxh3_64(seed=layer_seed(self.key, layer))
        try:
            for portion in [buffers] if end - offset <= PORTION_BYTES else portions(buffers):
                if not read_exactly(self._fd, portion, offset):
                    return "the file is shorter than what was put"
                for buffer in portion:
                    digest.update(buffer)
                    offset += len(buffer)
        except OSError as exc:
            return f"cannot be read ({exc.strerror})"
        if offset != end or digest.intdigest() != self._checksums[layer]:
            return "the bytes are not those that were put"
        return None

    def is_cached(self) -> bool:
        """Whether the file's middle is in the page cache; ``True`` if the system cannot tell.

        Asking may start read-ahead, so ask only about what will be read.
        """
        middle = (self._frame.offsets[0] + self._frame.offsets[-1]) // 2
        try:
            with self._lock:
                return bool(os.preadv(self._fd, [bytearray(1)], middle, os.RWF_NOWAIT))
        except BlockingIOError:
            return False
        except (OSError, AttributeError):  # the system or file system cannot tell
            return True

    def is_unlinked(self) -> bool:
        """Whether the file is gone from its directory."""
        with self._lock:
            return self._fd < 0 or os.fstat(self._fd).st_nlink == 0

    def release(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # No lock: no other thread has this reader.
        with contextlib.suppress(AttributeError, OSError):
            if self._fd >= 0:
                os.close(self._fd)


def copy_bytes(stored: np.ndarray, buffers: list[memoryview]) -> None:
    """Fill buffers, one after another, with the bytes of ``stored``, uint8 ``[n]``."""
    copied = 0
    for buffer in buffers:
        target = np.frombuffer(buffer, dtype=np.uint8)
        target[:] = stored[copied : copied + len(target)]  # releases the GIL
        copied += len(target)


def portions(buffers: list[memoryview]) -> Iterator[list[memoryview]]:
    """The buffers in order, cut into groups of at most :data:`PORTION_BYTES`."""
    portion: list[memoryview] = []
    room = PORTION_BYTES
    for rest in buffers:
        while rest:
            portion.append(rest[:room])
            rest, room = rest[room:], room - len(portion[-1])
            if not room:
                yield portion
                portion, room = [], PORTION_BYTES
    if portion:
        yield portion


def read_exactly(fd: int, buffers: list[memoryview], offset: int) -> bool:
    """Fill all buffers from ``offset``; ``False`` if the file ends before they are full."""
    left = buffers
    while left:
        count = os.preadv(fd, left[:IOV_MAX], offset)
        if not count:
            return False
        offset += count
        full = 0
        while full < len(left) and count >= len(left[full]):
            count -= len(left[full])
            full += 1
        left = left[full:]
        if count:
            left[0] = left[0][count:]
    return True
