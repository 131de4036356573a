"""A get of what is not there, over an index of very many rows.

The rows are inserted into the index of a scratch store by one SQL statement for all of them. The index
is opened again afterwards, and must count them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from blendrag.lab.bench.store_chunks import DISK_BYTES, NAMESPACE, key_of, random_chunk, stored
from blendrag.lab.bench.store_rounds import MeasuredNothingError, Row, Tick, Way, measure
from blendrag.store import KVStore, open_store
from blendrag.store.index import Index
from blendrag.store.kv import ChunkKV, KVLayout, LayerShape
from blendrag.store.payload_files import Name, new_name

#: Keys that are looked for, one after the other.
GETS = 2000
_BATCH_ROWS = 100_000
_SMALL = KVLayout((LayerShape(1, 16),), "float32")
_INSERT = "INSERT INTO payload (namespace, key, nonce, size_bytes) VALUES (?, ?, ?, 1)"


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
        index.open()
        done = 0
        while batch := list(islice(values, _BATCH_ROWS)):
            tick(f"miss: {done:,} of {rows:,} rows")
            with index.transaction() as database:
                database.executemany(_INSERT, batch)
            done += len(batch)
        index.sync()


def _rows(count: int) -> Iterator[Name]:
    for number in range(count):
        yield new_name(NAMESPACE, hashlib.sha256(b"%d" % number).hexdigest())


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
