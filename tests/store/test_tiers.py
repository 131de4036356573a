"""The memory tier, and memory over disk: promotion, limits, counters."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from blendrag.errors import CorruptKVError, InvalidInputError, StoreFullError
from blendrag.store import DiskStore, KVReader, MemoryStore, TieredStore, tiered
from blendrag.store.kv import KVLayout

CHUNK_BYTES = 3 * 2 * 16 * 24 * 4


@pytest.fixture
def make_tiers(root):
    opened = []

    def make(ram_bytes=1 << 20, disk_bytes=1 << 30, read_only=False):
        disk = DiskStore(root, disk_bytes, read_only=read_only)
        opened.append(TieredStore(MemoryStore(ram_bytes), disk))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def tier_of(lab, store, number):
    reader = lab.open(store, number)
    with_tier = reader.tier
    reader.close()
    return with_tier


# -- memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_memory_serves_bit_exact_into_a_prompt(lab, dtype):
    store = MemoryStore(1 << 20)
    layout = KVLayout(lab.layout.layers, dtype)
    kv = lab.kv(1, layout)
    store.put(lab.namespace, lab.key(1), kv)
    reader = store.open(lab.namespace, lab.key(1), layout, lab.tokens)
    assert isinstance(reader, KVReader)
    for i, shape in enumerate(layout.layers):
        prompt = torch.zeros(2, shape.kv_heads, 50, shape.head_dim, dtype=layout.torch_dtype)
        reader.read_layer(i, prompt[:, :, 9 : 9 + lab.tokens])
        assert torch.equal(prompt[:, :, 9 : 9 + lab.tokens], kv.layers[i])
        assert (prompt[:, :, :9] == 0).all()
        assert (prompt[:, :, 9 + lab.tokens :] == 0).all()


def test_memory_keeps_its_own_copy(lab):
    store = MemoryStore(1 << 20)
    kv = lab.kv(1)
    store.put(lab.namespace, lab.key(1), kv)
    kv.layers[0].zero_()
    assert lab.is_right(store, 1)


def test_memory_stays_within_its_limit_and_drops_the_least_recently_used(lab):
    store = MemoryStore(3 * CHUNK_BYTES)
    for number in range(3):
        lab.put(store, number)
    reader = lab.open(store, 0)
    lab.put(store, 3)
    assert [n for n in range(4) if lab.has(store, n)] == [0, 2, 3]
    assert store.stats().size_bytes == 3 * CHUNK_BYTES
    assert store.stats().evictions == 1
    lab.put(store, 4)
    lab.put(store, 5)
    lab.put(store, 6)
    assert not lab.has(store, 0)
    assert all(map(torch.equal, lab.read(reader), lab.kv(0).layers))


def test_memory_refuses_large_chunks_and_nan(lab):
    with pytest.raises(StoreFullError, match="--ram-bytes"):
        lab.put(MemoryStore(CHUNK_BYTES - 1), 1)
    store = MemoryStore(CHUNK_BYTES)
    kv = lab.kv(3)
    kv.layers[2][0, 0, 0, 0] = float("nan")
    with pytest.raises(InvalidInputError, match="layer 2"):
        store.put(lab.namespace, lab.key(3), kv)


def test_memory_misses_for_another_layout_or_length(lab):
    store = MemoryStore(1 << 20)
    lab.put(store, 1)
    other = KVLayout(lab.layout.layers, "float16")
    assert store.open(lab.namespace, lab.key(1), other, lab.tokens) is None
    assert store.open(lab.namespace, lab.key(1), lab.layout, lab.tokens + 1) is None
    assert store.open(lab.key(1), lab.key(1), lab.layout, lab.tokens) is None
    assert store.delete(lab.namespace, lab.key(1))
    assert store.stats().size_bytes == 0


@pytest.mark.parametrize("kind", ["memory", "tiers"])
def test_a_closed_reader_stays_closed(lab, make_tiers, kind):
    store = MemoryStore(1 << 20) if kind == "memory" else make_tiers()
    lab.put(store, 1)
    reader = lab.open(store, 1)
    reader.close()
    with pytest.raises(ValueError, match="is closed"):
        lab.read(reader)


# -- promotion ---------------------------------------------------------------------------------------


def test_a_chunk_that_was_read_is_promoted(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    assert tier_of(lab, store, 1) == "disk"
    store.drain()
    assert tier_of(lab, store, 1) == "disk"  # no layer was read: not promoted
    assert lab.is_right(store, 1)
    store.drain()
    assert tier_of(lab, store, 1) == "memory"
    assert lab.is_right(store, 1)


def test_a_chunk_is_promoted_whole_after_one_layer_was_read(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    reader = lab.open(store, 1)
    reader.read_layer(1, torch.zeros(lab.layout.layer_shape(1, lab.tokens)))
    reader.close()
    store.drain()
    assert tier_of(lab, store, 1) == "memory"
    assert lab.is_right(store, 1)


def test_layers_that_were_not_read_are_verified_before_promotion(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    with open(lab.file(store.disk, 1), "r+b") as file:
        file.seek(5000)  # in layer 0
        file.write(b"\xff\xff\xff\xff")
    reader = lab.open(store, 1)
    reader.read_layer(1, torch.zeros(lab.layout.layer_shape(1, lab.tokens)))
    reader.close()
    store.drain()
    assert lab.open(store, 1) is None
    assert store.stats().quarantined == 1


def test_a_corrupt_chunk_is_counted_once_and_not_promoted(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    reader = lab.open(store, 1)
    os.truncate(lab.file(store.disk, 1), lab.entry_bytes - 1)
    reader.read_layer(0, torch.zeros(lab.layout.layer_shape(0, lab.tokens)))
    with pytest.raises(CorruptKVError):
        reader.read_layer(2, torch.zeros(lab.layout.layer_shape(2, lab.tokens)))
    reader.close()
    store.drain()
    stats = store.stats()
    layer_bytes = lab.layout.layer_bytes(0, lab.tokens)
    assert (stats.quarantined, stats.tiers[1].read_bytes, stats.promotions) == (1, layer_bytes, 0)


def test_a_chunk_larger_than_memory_is_served_from_disk(lab, make_tiers):
    store = make_tiers(ram_bytes=CHUNK_BYTES - 1)
    lab.put(store, 1)
    assert lab.is_right(store, 1)
    store.drain()
    assert tier_of(lab, store, 1) == "disk"


def test_a_reader_closed_after_its_store_promotes_nothing(lab, filled):
    tiers = TieredStore(MemoryStore(1 << 20), filled)
    before = lab.descriptors()
    reader = lab.open(tiers, 1)
    lab.read(reader)
    tiers._promotion.close()
    reader.close()
    assert lab.descriptors() == before
    assert tiers.memory.stats().entries == 0
    tiers.close()
    tiers.close()


def test_a_full_queue_leaves_chunks_on_disk_and_counts_them(lab, make_tiers, monkeypatch):
    store = make_tiers()
    at_work, go_on = threading.Event(), threading.Event()
    real = tiered.Promotion._promote

    def slow(self, job):
        at_work.set()
        assert go_on.wait(30)
        real(self, job)

    monkeypatch.setattr(tiered.Promotion, "_promote", slow)
    count = tiered.QUEUE_CHUNKS + 9
    for number in range(count):
        lab.put(store, number)
    assert lab.is_right(store, 0)
    assert at_work.wait(10)
    descriptors = lab.descriptors()
    for number in range(1, count):
        assert lab.is_right(store, number)
    assert store.stats().queue_drops == count - 1 - tiered.QUEUE_CHUNKS
    assert lab.descriptors() == descriptors + tiered.QUEUE_CHUNKS  # one of each that waits
    go_on.set()
    store.drain()
    assert store.stats().promotions == 1 + tiered.QUEUE_CHUNKS
    assert lab.open(store, count - 1).tier == "disk"
    assert lab.is_right(store, count - 1)
    store.drain()
    assert lab.open(store, count - 1).tier == "memory"


def test_uses_that_cannot_be_noted_do_not_end_the_promotions(lab, make_tiers, monkeypatch):
    monkeypatch.setattr(tiered, "RECENCY_INTERVAL_S", 0.01)
    store = make_tiers()
    failed = threading.Event()

    def fail():
        failed.set()
        raise OSError("the disk fails")

    for number in (1, 2):
        lab.put(store, number)
    assert lab.is_right(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(store.disk, "flush_recency", fail)
        store.drain()
        assert failed.wait(5)
        time.sleep(0.05)
        assert store._promotion._thread.is_alive()
    assert lab.is_right(store, 2)
    store.drain()
    assert tier_of(lab, store, 2) == "memory"


def test_close_finishes_promotions_and_releases_every_descriptor(lab, make_tiers):
    before, others = lab.descriptors(), set(threading.enumerate())
    store = make_tiers()
    for number in range(20):
        lab.put(store, number)
    for number in range(20):
        assert lab.is_right(store, number)
    assert set(threading.enumerate()) > others
    store.close()
    store.close()
    assert store._promotion.counters["promotions"] == 20
    assert lab.descriptors() == before
    assert set(threading.enumerate()) <= others


def test_an_abandoned_reader_releases_its_descriptor(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    lab.open(store, 1).close()
    before = lab.descriptors()
    for _ in range(10):
        lab.open(store, 1)
    assert lab.descriptors() == before


# -- both tiers --------------------------------------------------------------------------------------


def test_delete_reaches_both_tiers(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    assert lab.is_right(store, 1)
    store.drain()
    assert store.memory.contains(lab.namespace, lab.key(1))
    assert store.delete(lab.namespace, lab.key(1))
    assert not store.disk.contains(lab.namespace, lab.key(1))
    assert not store.memory.contains(lab.namespace, lab.key(1))
    assert lab.open(store, 1) is None


def test_a_reader_open_during_delete_does_not_bring_the_chunk_back(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    reader = lab.open(store, 1)
    lab.read(reader)
    assert store.delete(lab.namespace, lab.key(1))
    reader.close()
    store.drain()
    assert lab.open(store, 1) is None


def test_a_chunk_in_memory_only_is_not_contained_and_is_put_again(lab, make_tiers):
    store = make_tiers(disk_bytes=2 * lab.entry_bytes)
    for number in range(2):
        lab.put(store, number)
        assert lab.is_right(store, number)
    store.drain()
    lab.put(store, 2)  # evicts 0 from disk
    lab.file(store.disk, 1).unlink()
    assert tier_of(lab, store, 0) == tier_of(lab, store, 1) == "memory"
    assert not lab.has(store, 0)
    assert not lab.has(store, 1)
    lab.put(store, 1)
    assert lab.has(store, 1)
    assert lab.is_right(store.disk, 1)


def test_a_chunk_used_in_memory_is_recent_on_disk(lab, make_tiers):
    store = make_tiers(disk_bytes=3 * lab.entry_bytes)
    for number in range(3):
        lab.put(store, number)
    assert lab.is_right(store, 0)
    store.drain()
    lab.put(store, 3)
    assert tier_of(lab, store, 0) == "memory"
    lab.put(store, 4)
    assert set(store.keys(lab.namespace)) == {lab.key(n) for n in (0, 3, 4)}


def test_a_store_without_room_serves_misses(lab, make_tiers):
    store = make_tiers(ram_bytes=0, disk_bytes=0)
    with pytest.raises(StoreFullError):
        lab.put(store, 1)
    assert lab.open(store, 1) is None
    assert store.stats().size_bytes == 0


def test_counters_of_each_tier(lab, make_tiers):
    store = make_tiers(ram_bytes=2 * CHUNK_BYTES, disk_bytes=3 * lab.entry_bytes)
    for number in (0, 1, 2, 2):
        lab.put(store, number)
    for number in range(3):
        assert lab.is_right(store, number)  # from disk, then promoted; 0 is dropped from memory
        store.drain()
    assert lab.is_right(store, 2)  # from memory
    assert lab.open(store, 9) is None
    lab.put(store, 3)  # evicts 0 from disk
    stats = store.stats()
    memory, disk = stats.tiers
    assert (memory.tier, disk.tier) == ("memory", "disk")
    assert (stats.puts, stats.hits, stats.misses, stats.promotions) == (4, 4, 1, 3)
    assert (memory.hits, disk.hits) == (1, 3)
    assert (memory.evictions, disk.evictions, stats.evictions) == (1, 1, 1)
    assert (memory.entries, memory.size_bytes) == (2, 2 * CHUNK_BYTES)
    assert (disk.entries, disk.size_bytes) == (3, 3 * lab.entry_bytes)
    assert memory.read_bytes == CHUNK_BYTES
    assert disk.read_bytes == 2 * 3 * CHUNK_BYTES  # each by the query, and by the promotion
    assert (memory.limit_bytes, disk.limit_bytes) == (2 * CHUNK_BYTES, 3 * lab.entry_bytes)


def test_queries_and_eviction_at_once_never_see_wrong_bytes(lab, make_tiers):
    store = make_tiers(ram_bytes=2 * CHUNK_BYTES, disk_bytes=4 * lab.entry_bytes)
    right = [lab.kv(number).layers for number in range(8)]
    stop, wrong, read = threading.Event(), [], []

    def query():
        while not stop.is_set():
            for number in range(8):
                reader = lab.open(store, number)
                if reader is None:
                    continue
                if not all(map(torch.equal, lab.read(reader), right[number])):
                    wrong.append(number)
                read.append(number)
                reader.close()

    thread = threading.Thread(target=query)
    thread.start()
    for _ in range(6):
        for number in range(8):
            lab.put(store, number)
    stop.set()
    thread.join()
    assert wrong == []
    assert read
    assert store.stats().quarantined == 0
