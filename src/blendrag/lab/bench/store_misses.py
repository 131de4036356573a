"""A get of what is not there, over an index of very many rows.

The rows are put into the index of a scratch store by SQL, in the form that diskcache writes: one
statement for all instead of three for each. The index is opened again afterwards, and must count them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from diskcache.core import MODE_RAW

from blendrag.lab.bench.store_chunks import DISK_BYTES, NAMESPACE, key_of, random_chunk, stored
from blendrag.lab.bench.store_rounds import MeasuredNothingError, Row, Tick, Way, measure
from blendrag.store import KVStore, open_store
from blendrag.store.files import new_name
from blendrag.store.index import Index
from blendrag.store.kv import ChunkKV, KVLayout, LayerShape
from blendrag.store.rows import Row as IndexRow
from blendrag.store.rows import row_key

#: Keys that are looked for, one after the other.
GETS = 2000
_BATCH_ROWS = 100_000
_SMALL = KVLayout((LayerShape(1, 16),), "float32")
_INSERT = (
    "INSERT INTO Cache (key, raw, store_time, expire_time, access_time, access_count, tag, size, "
    "mode, filename, value) VALUES (?, 1, 0, NULL, 0, 0, NULL, ?, ?, NULL, ?)"
)


class Misses(Way):
    """:meth:`KVStore.open` of a key that was never put."""

    name = "store"

    def __init__(self, store: KVStore, layout: KVLayout, tokens: int) -> None:
        self._store, self._layout, self._tokens = store, layout, tokens
        self._number = 0
        self._key = ""
        self._found: object = None
        self._misses = 0

    def prepare(self) -> None:
        self._number += 1
        self._key = key_of(f"missing {self._number}")
        self._found, self._misses = self, self._store.stats().misses

    def run(self) -> None:
        self._found = self._store.open(NAMESPACE, self._key, self._layout, self._tokens)

    def check(self) -> None:
        if self._found is not None or self._store.stats().misses != self._misses + 1:
            raise MeasuredNothingError(
                "a key that was never put was found, or was not looked for, expected a miss; "
                "this installation cannot be trusted"
            )


def measure_misses(root: Path, rows: int, layout: KVLayout, tokens: int, tick: Tick) -> Row:
    """One get in a store of ``rows`` chunks, the memory tier above it on as for an engine."""
    chunk = random_chunk(_SMALL, 4, 0)
    with contextlib.closing(_store(root)) as store:
        store.put(NAMESPACE, key_of("present"), chunk)
    fill_index(root / "index", rows - 1, tick)
    with contextlib.closing(_store(root)) as store:
        _require(store, chunk, rows)
        (found,) = measure("miss", [Misses(store, layout, tokens)], GETS, _quiet(tick))
    return found


def fill_index(directory: Path, rows: int, tick: Tick) -> None:
    """Add that many rows, of payloads that do not exist, to the index of a store nobody has open."""
    index = Index(directory)
    values = _rows(rows)
    with contextlib.closing(index), index.exclusive():
        if not index.open():
            raise MeasuredNothingError(
                f"the index in {directory} cannot be opened, expected the one just made; "
                "choose another --dir"
            )
        done = 0
        while batch := list(islice(values, _BATCH_ROWS)):
            tick(f"miss: {done:,} of {rows:,} rows")
            with index.transaction() as cache:
                cache._con.executemany(_INSERT, batch)
            done += len(batch)
        index.sync()


def _rows(count: int) -> Iterator[tuple[str, int, int, str]]:
    size_bytes = 1
    for number in range(count):
        key = hashlib.sha256(b"%d" % number).hexdigest()
        row = IndexRow(new_name(NAMESPACE, key), size_bytes)
        yield row_key(NAMESPACE, key), size_bytes, MODE_RAW, row.encode()


def _require(store: KVStore, chunk: ChunkKV, rows: int) -> None:
    entries = store.stats().entries
    if entries != rows or not stored(store, "present", chunk):
        raise MeasuredNothingError(
            f"the index has {entries} rows, expected {rows} and among them the one that was put; "
            "choose another --dir"
        )


def _store(root: Path) -> KVStore:
    return open_store(root, ram_bytes=1 << 30, disk_bytes=DISK_BYTES)


def _quiet(tick: Tick) -> Tick:
    """Progress of many rounds that take no time."""

    def said(text: str) -> Any:
        if text.endswith("warming up"):
            tick("miss: looking up")

    return said
