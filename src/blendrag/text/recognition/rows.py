"""What is kept of a chunk to find it by: hashes of how it begins and of the whole."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from blendrag.text.chunking import canonical
from blendrag.text.recognition.hashing import PrefixSums

#: Characters of the beginnings that are hashed: the first for chunks too short for the second.
LEVELS = (16, *(32 << i for i in range(10)))
SHORT, ANCHOR = LEVELS[:2]


class AnchorRow(NamedTuple):
    """What is persisted of a chunk: every hash fits a signed 64-bit column."""

    chunk_id: str
    anchor_hash: int
    """Of the first 32 characters; of the first 16 where there are fewer than 32; 0 below."""
    length: int
    digest: int
    """Of the whole text."""
    heads: tuple[int, ...] = ()
    """Of the first 64, 128, 256, … characters, as far as the text goes."""


def row_of(chunk_id: str, text: str) -> AnchorRow:
    """The row to persist for a chunk."""
    sums = PrefixSums(canonical(text))
    heads = head_lengths(sums.size)
    lengths = np.array([*heads, sums.size], np.intp)
    *hashes, digest = sums.hashes(np.zeros(len(lengths), np.intp), lengths).tolist()
    return AnchorRow(chunk_id, hashes[0] if heads else 0, sums.size, digest, tuple(hashes[1:]))


#: Numbers of a packed row: length, digest, and the hash of the beginning at every level.
_PACKED = 2 + len(LEVELS)
#: Bytes of a packed row; the first eight are the length.
PACKED_BYTES = 8 * _PACKED


def packed(row: AnchorRow) -> bytes:
    """Everything but the id, in as many bytes for every row."""
    numbers = np.zeros(_PACKED, "<i8")
    numbers[:2] = row.length, row.digest
    if row.length >= SHORT:
        first = 2 + (row.length >= ANCHOR)
        numbers[first : first + 1 + len(row.heads)] = (row.anchor_hash, *row.heads)
    return numbers.tobytes()


def unpacked(rows: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths [n], digests [n] and hashes [n, levels] of packed rows, one behind the other."""
    numbers = np.frombuffer(rows, "<i8").reshape(-1, _PACKED)
    hashes = numbers.astype(np.uint64)
    return numbers[:, 0].astype(np.intp), hashes[:, 1].copy(), hashes[:, 2:].copy()


def head_lengths(length: int) -> tuple[int, ...]:
    """Lengths of the beginnings that are hashed of a text so long."""
    if length < ANCHOR:
        return (SHORT,) if length >= SHORT else ()
    return tuple(level for level in LEVELS[1:] if level <= length)
