"""Tiers: where KV is read from, and a device as slow as its name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from blendrag.errors import InvalidInputError
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.kv import ChunkKV
from blendrag.store.memory import MemoryStore
from blendrag_lab.bench import tiers
from blendrag_lab.bench.tiers import Throttle, ThrottledStore, parse_tier
from blendrag_lab.bench.workload import Workload
from lab.tests.bench.small import tiny_adapter, tiny_bench

NAMESPACE, KEY, OTHER_KEY = "a" * 64, "b" * 64, "c" * 64
TOKENS = 30


@pytest.fixture(scope="module")
def kv() -> ChunkKV:
    return tiny_adapter().encode((), tiny.random_ids(TOKENS)[0].tolist())


def in_memory(device: Throttle) -> ThrottledStore:
    store: Any = MemoryStore(1 << 20)  # of a KVStore, only what is read from it
    return ThrottledStore(store, device, "slow")


def test_a_throttled_read_delivers_the_same_bytes_no_sooner_than_its_device(kv):
    size = stored_chunk_bytes(kv.layout, TOKENS)
    slow = in_memory(Throttle(size / 0.2))
    slow.put(NAMESPACE, KEY, kv)
    began = time.perf_counter()
    reader = slow.open(NAMESPACE, KEY, kv.layout, TOKENS)
    assert (reader.tier, reader.tokens) == ("slow", TOKENS)
    for i, expected in enumerate(kv.layers):
        layer = torch.empty_like(expected)
        reader.read_layer(i, layer)
        assert torch.equal(layer, expected)
    assert time.perf_counter() - began >= 0.199
    assert slow.open(NAMESPACE, OTHER_KEY, kv.layout, 1) is None


def test_readers_share_a_device_that_owes_nothing_after_a_pause(monkeypatch):
    now = 5.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    device = Throttle(1000.0)
    assert [device.begin(100), device.begin(100)] == pytest.approx([5.1, 5.2])
    now = 9.0
    assert device.begin(100) == pytest.approx(9.1)


def test_encoded_chunks_take_fewer_bytes_of_the_device(kv, monkeypatch):
    asked: list[int] = []

    def begin(device: Throttle, size: int) -> float:
        asked.append(size)
        return 0.0

    monkeypatch.setattr(Throttle, "begin", begin)
    slow = in_memory(Throttle(1e9))
    for key, encoding in ((KEY, "native"), (OTHER_KEY, "int8")):
        layout = kv.layout.encoded(encoding)
        slow.put(NAMESPACE, key, replace(kv, layout=layout))
        slow.open(NAMESPACE, key, layout, TOKENS).read_layer(0, torch.empty_like(kv.layers[0]))
    native, encoded = asked
    assert encoded < 0.6 * native


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("0.5GB/s", 5e8), ("200 MB/s", 2e8), ("1kb/s", 1e3)]
)
def test_a_throughput_is_a_tier(text, bytes_per_s):
    tier = parse_tier(text)
    assert (tier.name, tier.bytes_per_s) == (text, bytes_per_s)


@pytest.mark.parametrize(
    "text", ["", "floppy", "0GB/s", "-1GB/s", "5/s", "5GB/s or so", "1B/s", "0.9KB/s"]
)
def test_a_bad_tier_is_refused_in_one_sentence(text):
    with pytest.raises(InvalidInputError, match="is none of memory, disk, cold") as caught:
        parse_tier(text)
    assert tiny.one_sentence(str(caught.value))


@pytest.mark.parametrize("name", ["memory", "disk", "9GB/s"])
def test_a_bench_reads_from_the_tier_it_names(name):
    with tiny_bench(Workload(2, 32, 8, 0.15), parse_tier(name)) as bench:
        token, _ = bench.blend()
        bench.there.prepare()
        with bench.opened() as load:
            assert {span.reader.tier for span in load.spans} == {name}
        assert bench.blend()[0] == token


def test_a_cold_tier_drops_its_files_before_every_measurement(monkeypatch):
    dropped: list[int] = []
    gone = iter((True, False))

    def drop_cached(files: Sequence[Path]) -> bool:
        dropped.append(len(files))
        return next(gone)

    monkeypatch.setattr(tiers, "drop_cached", drop_cached)
    monkeypatch.setattr(tiers, "cached_share", lambda files: 0.5)
    with tiny_bench(Workload(2, 32, 8, 0.15), parse_tier("cold")) as bench:
        bench.timer(lambda: None)()
        assert dropped == [2]
        with pytest.raises(InvalidInputError, match="50% of the files stay in the page cache"):
            bench.timer(lambda: None)()
