"""The memory tier, and memory over disk: promotion, limits, counters."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
import torch

from blendrag.errors import CorruptKVError, StoreFullError
from blendrag.store import promotion
from blendrag.store.disk import DiskStore
from blendrag.store.kv import KVLayout
from blendrag.store.memory import MemoryStore
from blendrag.store.tiered import KVStore

CHUNK_BYTES = 3 * 2 * 16 * 24 * 4


@pytest.fixture
def make_tiers(root):
    with contextlib.ExitStack() as opened:

        def make(ram_bytes=1 << 20, disk_bytes=1 << 30):
            store = KVStore(MemoryStore(ram_bytes), DiskStore(root, disk_bytes))
            return opened.enter_context(contextlib.closing(store))

        yield make


@pytest.fixture
def tiers(lab, make_tiers):
    """Chunk 1, on disk."""
    store = make_tiers()
    lab.put(store, 1)
    return store


def tier_of(lab, store, number):
    with contextlib.closing(lab.open(store, number)) as reader:
        return reader.tier


def promote(lab, store, *numbers):
    """Read these chunks, and wait until they are in memory."""
    for number in numbers:
        assert lab.is_right(store, number)
    store.drain()


def read_layer(lab, reader, layer):
    reader.read_layer(layer, torch.zeros(lab.layout.layer_shape(layer, lab.tokens)))


# -- memory ------------------------------------------------------------------------------------------


def test_memory_stays_within_its_limit_and_drops_the_least_recently_used(lab):
    store = MemoryStore(3 * CHUNK_BYTES)
    for number in range(3):
        lab.put(store, number).layers[0].zero_()  # memory has its own copy
    reader = lab.open(store, 0)
    lab.put(store, 3)
    assert lab.right(store) == [0, 2, 3]
    assert (store.stats().size_bytes, store.stats().evictions) == (3 * CHUNK_BYTES, 1)
    for number in (4, 5, 6):
        lab.put(store, number)
    assert not lab.has(store, 0)
    assert lab.gives(reader, lab.kv(0))
    with pytest.raises(StoreFullError, match="raise ram_bytes"):
        lab.put(MemoryStore(CHUNK_BYTES - 1), 1)


def test_memory_misses_for_another_layout_or_length(lab):
    store = MemoryStore(1 << 20)
    lab.put(store, 1)
    assert lab.open(store, 1, KVLayout(lab.layout.layers, "float16")) is None
    assert lab.open(store, 1, tokens=lab.tokens + 1) is None
    assert store.open(lab.key(1), lab.key(1), lab.layout, lab.tokens) is None
    assert store.delete(lab.namespace, lab.key(1))
    assert store.stats().size_bytes == 0


# -- promotion ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["disk", "memory"])
def test_a_closed_reader_stays_closed(lab, tiers, tier):
    if tier == "memory":
        promote(lab, tiers, 1)
    reader = lab.open(tiers, 1)
    assert reader.tier == tier
    reader.close()
    with pytest.raises(ValueError, match="is closed"):
        lab.read(reader)


def test_a_chunk_is_promoted_whole_after_one_layer_was_read(lab, tiers):
    assert tier_of(lab, tiers, 1) == "disk"
    tiers.drain()
    with contextlib.closing(lab.open(tiers, 1)) as reader:
        assert reader.tier == "disk"  # no layer was read before
        read_layer(lab, reader, 1)
    tiers.drain()
    assert tier_of(lab, tiers, 1) == "memory"
    assert lab.is_right(tiers, 1)


def test_layers_that_were_not_read_are_verified_before_promotion(lab, tiers):
    lab.flip(lab.file(tiers.disk, 1))  # in layer 0
    with contextlib.closing(lab.open(tiers, 1)) as reader:
        read_layer(lab, reader, 1)
    tiers.drain()
    assert lab.open(tiers, 1) is None
    assert tiers.stats().quarantined == 1


def test_a_corrupt_chunk_is_counted_once_and_not_promoted(lab, tiers):
    with contextlib.closing(lab.open(tiers, 1)) as reader:
        os.truncate(lab.file(tiers.disk, 1), lab.entry_bytes - 1)
        read_layer(lab, reader, 0)
        with pytest.raises(CorruptKVError):
            read_layer(lab, reader, 2)
    tiers.drain()
    stats = tiers.stats()
    layer_bytes = lab.layout.layer_bytes(0, lab.tokens)
    assert (stats.quarantined, stats.tiers[1].read_bytes, stats.promotions) == (1, layer_bytes, 0)


def test_a_chunk_larger_than_memory_is_served_from_disk(lab, make_tiers):
    store = make_tiers(ram_bytes=CHUNK_BYTES - 1)
    lab.put(store, 1)
    promote(lab, store, 1)
    assert tier_of(lab, store, 1) == "disk"


def test_a_reader_closed_after_its_store_promotes_nothing(lab, filled):
    tiers = KVStore(MemoryStore(1 << 20), filled)
    before = lab.descriptors()
    reader = lab.open(tiers, 1)
    lab.read(reader)
    tiers._promotion.close()
    reader.close()
    assert lab.descriptors() <= before
    assert tiers.memory.stats().entries == 0
    tiers.close()
    tiers.close()


def test_a_full_queue_leaves_chunks_on_disk_and_counts_them(lab, make_tiers, monkeypatch):
    monkeypatch.setattr(promotion, "QUEUE_CHUNKS", 4)
    store = make_tiers()
    at_work, go_on = threading.Event(), threading.Event()
    real = promotion.Promotion._promote

    def slow(*args):
        at_work.set()
        assert go_on.wait(60)
        real(*args)

    monkeypatch.setattr(promotion.Promotion, "_promote", slow)
    for number in range(8):
        lab.put(store, number)
    assert lab.is_right(store, 0)
    assert at_work.wait(60)
    descriptors = lab.descriptors()
    assert len(lab.right(store, range(1, 8))) == 7
    assert store.stats().queue_drops == 3
    assert lab.descriptors() == descriptors + 4  # one of each that waits
    go_on.set()
    store.drain()
    assert store.stats().promotions == 5
    assert tier_of(lab, store, 7) == "disk"
    promote(lab, store, 7)
    assert tier_of(lab, store, 7) == "memory"


def test_uses_that_cannot_be_noted_do_not_end_the_promotions(lab, make_tiers, monkeypatch):
    monkeypatch.setattr(promotion, "RECENCY_INTERVAL_S", 0.01)
    store, failures = make_tiers(), threading.Semaphore(0)

    def fail():
        failures.release()
        raise OSError("the disk fails")

    for number in (1, 2):
        lab.put(store, number)
    promote(lab, store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(store.disk, "flush_recency", fail)
        assert all(failures.acquire(timeout=60) for _ in range(2))
    promote(lab, store, 2)
    assert tier_of(lab, store, 2) == "memory"


def test_close_finishes_promotions_and_releases_every_descriptor(lab, make_tiers):
    before, others = lab.descriptors(), set(threading.enumerate())
    store = make_tiers()
    for number in range(20):
        lab.put(store, number)
        assert lab.is_right(store, number)
    store.drain()
    open_now = lab.descriptors()
    lab.open(store.disk, 1)  # abandoned
    assert lab.descriptors() == open_now
    assert set(threading.enumerate()) > others
    store.close()
    store.close()
    assert store._promotion.counters["promotions"] == 20
    assert lab.descriptors() <= before
    assert set(threading.enumerate()) <= others


# -- both tiers --------------------------------------------------------------------------------------


def test_delete_reaches_both_tiers_and_open_readers(lab, tiers):
    promote(lab, tiers, 1)
    assert lab.has(tiers.memory, 1)
    assert tiers.delete(lab.namespace, lab.key(1))
    assert not lab.has(tiers.disk, 1)
    assert not lab.has(tiers.memory, 1)
    lab.put(tiers, 1)
    reader = lab.open(tiers, 1)
    lab.read(reader)
    assert tiers.delete(lab.namespace, lab.key(1))
    reader.close()  # promotes nothing
    tiers.drain()
    assert lab.open(tiers, 1) is None


def test_a_chunk_in_memory_only_is_not_contained_and_is_put_again(lab, make_tiers):
    store = make_tiers(disk_bytes=2 * lab.entry_bytes)
    for number in range(2):
        lab.put(store, number)
    promote(lab, store, 0, 1)
    lab.put(store, 2)  # evicts 0 from disk
    lab.file(store.disk, 1).unlink()
    assert tier_of(lab, store, 0) == tier_of(lab, store, 1) == "memory"
    assert not lab.has(store, 0)
    assert not lab.has(store, 1)
    lab.put(store, 1)
    assert lab.has(store, 1)
    assert lab.is_right(store.disk, 1)


def test_the_place_of_a_chunk_is_its_fastest_tier_or_where_it_survives_a_crash(lab, make_tiers):
    store = make_tiers()
    for number in (1, 2):
        lab.put(store, number)
    promote(lab, store, 1)
    one, two, three = map(lab.key, (1, 2, 3))
    assert store.where(lab.namespace, [one, two, three]) == {one: "memory", two: "disk"}
    durable = store.where(lab.namespace, [one, two, three], durable=True)
    assert durable == {one: "disk", two: "disk"}


def test_a_chunk_used_in_memory_is_recent_on_disk(lab, make_tiers):
    store = make_tiers(disk_bytes=3 * lab.entry_bytes)
    for number in range(3):
        lab.put(store, number)
    promote(lab, store, 0)
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
        promote(lab, store, number)  # 0 is dropped from memory
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
    kvs, stop, right = [lab.kv(number) for number in range(8)], threading.Event(), []

    def query():
        while not stop.is_set():
            for number, kv in enumerate(kvs):
                if (reader := lab.open(store, number)) is not None:
                    right.append(lab.gives(reader, kv))

    thread = threading.Thread(target=query)
    thread.start()
    for number in 6 * list(range(8)):
        store.put(lab.namespace, lab.key(number), kvs[number])
    stop.set()
    thread.join()
    assert right
    assert all(right)
    assert store.stats().quarantined == 0
