"""A payload read without the model it belongs to: by what it says of itself, every byte verified.

Owns the order in which bytes are believed: the header if it is the one that its own layout, the
name and the size require; then each layer if it has the header's checksum. Knows no directories.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise

import xxhash

from blendrag.errors import CorruptKVError
from blendrag.store.directories import OUT_OF_RESOURCES
from blendrag.store.files import Name, PayloadFiles, read_at
from blendrag.store.format import MAX_HEADER_BYTES, Description, describe, layer_seed

#: Bytes held at a time.
PIECE_BYTES = 1 << 20

#: Gives up to that many bytes, fewer only at the end; what it gave last may be overwritten.
Read = Callable[[int], memoryview]


@contextlib.contextmanager
def opened(files: PayloadFiles, name: Name) -> Iterator[tuple[int, Description]]:
    """A payload's descriptor and what it says of itself.

    Raises :class:`CorruptKVError` if that is not what was put, and ``OSError`` where nothing is known
    of the file: it is gone, not this user's to read, or this process has no descriptor left.
    """
    try:
        fd = files.open(name)
    except OSError as exc:
        if isinstance(exc, FileNotFoundError | PermissionError) or exc.errno in OUT_OF_RESOURCES:
            raise
        raise _unreadable(exc) from exc
    try:
        try:
            found = described(fd, name)
        except OSError as exc:
            raise _unreadable(exc) from exc
        if found is None:
            raise CorruptKVError("its header or size is not what was put")
        yield fd, found
    finally:
        os.close(fd)


def _unreadable(exc: OSError) -> CorruptKVError:
    return CorruptKVError(f"cannot be read ({exc.strerror or exc})")


def described(fd: int, name: Name) -> Description | None:
    """What a payload file says of itself, or ``None`` unless its name and size agree with it.

    Raises ``OSError`` when the file cannot be read.
    """
    try:
        (length,) = struct.unpack("<Q", read_at(fd, 8))
    except struct.error:
        return None
    if length > MAX_HEADER_BYTES:
        return None
    found = describe(read_at(fd, 8 + length))
    return found if fits(found, name.namespace, name.key, os.fstat(fd).st_size) else None


def header_of(fd: int, found: Description) -> bytes:
    """The bytes before the first layer, read again. Raises :class:`CorruptKVError`."""
    try:
        header = read_at(fd, found.frame.header_bytes)
    except OSError as exc:
        raise _unreadable(exc) from exc
    if describe(header) != found:
        raise CorruptKVError("its header is not what it was a moment ago")
    return header


def fits(found: Description | None, namespace: str, key: str, size_bytes: int) -> bool:
    """Whether a header is that of this entry and of a file of this size."""
    return found is not None and (found.namespace, found.key, found.file_bytes) == (
        namespace,
        key,
        size_bytes,
    )


def verified_pieces(found: Description, read: Read) -> Iterator[memoryview]:
    """The bytes behind the header, in order; each is the caller's until the next is asked for.

    Raises :class:`CorruptKVError` where a layer ends that is not the one that was put: what came
    before is to be thrown away.
    """
    for layer, (begin, end) in enumerate(pairwise(found.frame.offsets)):
        digest = xxhash.xxh3_64(seed=layer_seed(found.key, layer))
        left = end - begin
        while left:
            piece = read(min(left, PIECE_BYTES))
            if not piece:
                raise CorruptKVError(f"layer {layer} ends {left} bytes early")
            digest.update(piece)
            left -= len(piece)
            yield piece
        if digest.intdigest() != found.checksums[layer]:
            raise CorruptKVError(f"layer {layer}: the bytes are not those that were put")


def reader(fd: int, offset: int) -> Read:
    """Reads on from ``offset``, always into the same memory; raises :class:`CorruptKVError`."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    position = offset

    def read(size_bytes: int) -> memoryview:
        nonlocal position
        try:
            count = os.preadv(fd, [buffer[:size_bytes]], position)
        except OSError as exc:
            raise _unreadable(exc) from exc
        position += count
        return buffer[:count]

    return read
