"""Decoding a chunk into the compute dtype, against the read that its encoding saves on a disk of 2 GB/s.

Only decoding is timed, of bytes that have just been put where a verified read puts them. What is saved
is computed: the bytes that the encoding is smaller by, over the speed of the disk.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace
from typing import Any

import torch

from blendrag.lab.bench.store_rounds import MeasuredNothingError, Row, Tick, Way, measure
from blendrag.store.encodings import RELATIVE_ERROR, codec_of, staging_of, stored_chunk_bytes
from blendrag.store.kv import ChunkKV

#: What is read per second instead of being decoded: a common NVMe disk.
DISK_BYTES_PER_S = 2e9
ENCODINGS = ("int8", "fp8")
#: Of bfloat16, to which the decoded number is rounded in the end.
_ROUNDING = 2**-8


class Decodes(Way):
    """Every layer of a chunk, one after the other through the buffer of a reader."""

    def __init__(self, chunk: ChunkKV, encoding: str) -> None:
        layout = chunk.layout.encoded(encoding)
        codec, staging = codec_of(layout), staging_of(layout, chunk.tokens)
        assert codec is not None
        assert staging is not None
        self.name = encoding
        self.size_bytes = chunk.size_bytes
        self.saved_bytes = chunk.size_bytes - stored_chunk_bytes(layout, chunk.tokens)
        self._chunk, self._staging = chunk, staging
        self._stored = [codec.encode(i, layer) for i, layer in enumerate(chunk.layers)]
        self._decoded = [torch.zeros_like(layer) for layer in chunk.layers]
        self._error = RELATIVE_ERROR[encoding]

    def prepare(self) -> None:
        for out in self._decoded:
            out.zero_()

    def run(self) -> None:
        raise AssertionError("timed layer by layer")

    def seconds(self) -> float:
        total = 0.0
        for layer, (stored, out) in enumerate(zip(self._stored, self._decoded, strict=True)):
            began = 0.0

            def fill(room: Any, stored: torch.Tensor = stored) -> None:
                nonlocal began
                ctypes.memmove(room, stored.data_ptr(), stored.numel())
                began = time.perf_counter()

            self._staging.read(layer, fill, out)
            total += time.perf_counter() - began
        return total

    def check(self) -> None:
        for layer, (expected, out) in enumerate(
            zip(self._chunk.layers, self._decoded, strict=True)
        ):
            reach = expected.float().abs().max().item() * (2 * self._error + _ROUNDING)
            error = (out.float() - expected.float()).abs().max().item()
            if not error <= reach:
                raise MeasuredNothingError(
                    f"layer {layer} decoded from {self.name} is off by {error:.3g}, expected at "
                    f"most {reach:.3g}; this installation cannot be trusted"
                )


def measure_decoding(chunk: ChunkKV, rounds: int, tick: Tick) -> list[Row]:
    """For every encoding a row, its speed against the read that it saves, and a row of that read."""
    ways = {encoding: Decodes(chunk, encoding) for encoding in ENCODINGS}
    rows = []
    for decoded in measure("decode", list(ways.values()), rounds, tick):
        saved = ways[decoded.way].saved_bytes
        ms = saved / DISK_BYTES_PER_S * 1e3
        rows.append(replace(decoded, speed=ms / decoded.ms))
        rows.append(Row("decode", f"read saved by {decoded.way}", ms, ms, ms, saved, 1.0))
    return rows
