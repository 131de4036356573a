"""The store's speed beside what else could be done: reads, puts, misses, decoding, in one run.

Every part measures its ways in turn, round by round, and checks after each what it left behind; the
parts are in ``store_reads``, ``store_writes``, ``store_misses`` and ``store_decoding``. KV is random,
as time depends on shapes only. No model is loaded.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from blendrag.errors import InvalidInputError
from blendrag.lab.bench.scratch import scratch
from blendrag.lab.bench.store_chunks import Prompt, random_chunk
from blendrag.lab.bench.store_cold import is_cold
from blendrag.lab.bench.store_decoding import DISK_BYTES_PER_S, ENCODINGS, measure_decoding
from blendrag.lab.bench.store_misses import measure_misses
from blendrag.lab.bench.store_reads import measure_reads
from blendrag.lab.bench.store_rounds import Row, Tick
from blendrag.lab.bench.store_writes import measure_puts
from blendrag.store.durable import megabytes
from blendrag.store.kv import DTYPES, KVLayout, LayerShape

#: What one row of the index takes on disk, its share of the write-ahead log included.
_ROW_BYTES = 1200


@dataclass(frozen=True)
class StoreWorkload:
    """Chunks of one shape, and where they are written. The shape of the defaults is 0.5 MiB per layer."""

    layers: int = 24
    kv_heads: int = 2
    head_dim: int = 128
    dtype: str = "bfloat16"
    chunks: int = 6
    chunk_tokens: int = 512
    rows: int = 1_000_000
    """Of the index in which a key is missing."""
    rounds: int = 7
    directory: Path | None = None
    """On the disk to measure; ``None`` is where temporary files go."""

    @property
    def layout(self) -> KVLayout:
        return KVLayout((LayerShape(self.kv_heads, self.head_dim),) * self.layers, self.dtype)

    @property
    def disk_bytes(self) -> int:
        """Needed at most at once: payloads, the same for ``torch.load``, two puts, the index."""
        chunk_bytes = self.layout.chunk_bytes(self.chunk_tokens)
        return (2 * self.chunks + 2) * chunk_bytes + self.rows * _ROW_BYTES


@dataclass(frozen=True)
class Target:
    """A figure and what it has to be."""

    figure: str
    value: float
    bound: float
    at_least: bool
    """Otherwise at most."""
    met: bool | None
    """``None`` where nothing could be measured: a cold read of what does not leave the page cache."""


@dataclass(frozen=True)
class StoreResult:
    """One run; times in milliseconds per round, sizes in bytes."""

    directory: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    chunks: int
    chunk_tokens: int
    layer_bytes: int
    index_rows: int
    rounds: int
    threads: int
    load_average: tuple[float, float]
    """Of the last minute, before and after: on a machine with other work, more than its cores, times are
    those of waiting."""
    cold_cached_share: float
    """Of the pages that a cold read found in the page cache after all, the largest share."""
    rows: tuple[Row, ...]
    targets: tuple[Target, ...]

    def row(self, part: str, way: str) -> Row:
        return next(row for row in self.rows if (row.part, row.way) == (part, way))


def kv_shape(
    geometry: str | None, layers: int | None, kv_heads: int | None, head_dim: int | None
) -> tuple[int, int, int]:
    """Layers, KV heads and width: those of a model's geometry, or as given, or the defaults."""
    if geometry is None:
        plain = StoreWorkload
        return layers or plain.layers, kv_heads or plain.kv_heads, head_dim or plain.head_dim
    if any(size is not None for size in (layers, kv_heads, head_dim)):
        raise InvalidInputError(
            "--geometry says layers, heads and dim; leave out --layers, --heads and --dim, or it"
        )
    from blendrag.lab.bench.geometry import GEOMETRIES

    if geometry not in GEOMETRIES:
        raise InvalidInputError(f"geometry {geometry!r} is not one of {', '.join(GEOMETRIES)}")
    found = GEOMETRIES[geometry]
    width = found["hidden_size"] // found["num_attention_heads"]
    return found["num_hidden_layers"], found["num_key_value_heads"], width


def run_store(workload: StoreWorkload, tick: Tick = lambda text: None) -> StoreResult:
    """Measure in a directory of its own below ``workload.directory``, removed in the end.

    Raises :class:`InvalidInputError` for what cannot be measured, :class:`MeasuredNothingError` where
    something did not do what its time would stand for.
    """
    _check(workload)
    layout, tokens, rounds = workload.layout, workload.chunk_tokens, workload.rounds
    load = os.getloadavg()[0]
    with scratch(workload.directory) as root:
        tick("making chunks")
        chunks = [random_chunk(layout, tokens, seed) for seed in range(workload.chunks)]
        rows, share = measure_reads(root / "reads", Prompt(chunks), rounds, tick)
        rows += measure_puts(root / "puts", chunks[0], rounds, tick)
        rows += measure_decoding(chunks[0], rounds, tick)
        rows.append(measure_misses(root / "misses", workload.rows, layout, tokens, tick))
    return StoreResult(
        directory=str(root.parent),
        layers=workload.layers,
        kv_heads=workload.kv_heads,
        head_dim=workload.head_dim,
        dtype=workload.dtype,
        chunks=workload.chunks,
        chunk_tokens=tokens,
        layer_bytes=layout.layer_bytes(0, tokens),
        index_rows=workload.rows,
        rounds=rounds,
        threads=torch.get_num_threads(),
        load_average=(load, os.getloadavg()[0]),
        cold_cached_share=share,
        rows=tuple(rows),
        targets=_targets(rows, share),
    )


def _targets(rows: Sequence[Row], cold_cached_share: float) -> tuple[Target, ...]:
    """What the store is held to (see ``docs/store.md``)."""
    by = {(row.part, row.way): row for row in rows}

    def speed(part: str, way: str) -> float:
        found = by[part, way].speed
        assert found is not None
        return found

    warm, cold = speed("warm read", "store"), speed("cold read", "store")
    put, miss_ms = 1 / speed("put", "store"), by["miss", "store"].ms
    decoding = [(name, speed("decode", name)) for name in ENCODINGS]
    disk = f"{DISK_BYTES_PER_S / 1e9:.0f} GB/s"
    return (
        Target("warm read, share of raw preadv", warm, 0.75, True, warm >= 0.75),
        Target(
            "cold read, share of raw preadv", cold, 0.9, True,
            cold >= 0.9 if is_cold(cold_cached_share) else None,
        ),
        Target("put, times write+fsync+rename", put, 1.3, False, put <= 1.3),
        Target("miss, ms", miss_ms, 0.1, False, miss_ms < 0.1),
        *(
            Target(f"{name} decode, times the read it saves at {disk}", 1 / x, 1.0, False, x > 1.0)
            for name, x in decoding
        ),
    )  # fmt: skip


def _check(workload: StoreWorkload) -> None:
    if workload.dtype not in DTYPES:
        raise InvalidInputError(f"dtype {workload.dtype!r} is not one of {', '.join(DTYPES)}")
    directory = workload.directory or Path(tempfile.gettempdir())
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise InvalidInputError(
            f"--dir {directory} is no directory that can be written to; "
            "name one on the disk to measure"
        )
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < workload.disk_bytes:
        raise InvalidInputError(
            f"--dir {directory} has {megabytes(free_bytes)} left, expected "
            f"{megabytes(workload.disk_bytes)}; name another one, or "
            "take fewer --rows or --chunks or --tokens"
        )
