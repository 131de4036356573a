import os
import threading
import time

import pytest
import torch

from blendrag.errors import CorruptKVError, InvalidInputError, StoreFullError
from blendrag.store import DiskStore, KVReader, MemoryStore, TieredStore
from blendrag.store import tiered as promotion
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


def test_memory_refuses_what_it_cannot_hold_or_must_not(lab):
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


def test_a_chunk_read_whole_from_disk_is_in_memory_afterwards(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    assert tier_of(lab, store, 1) == "disk"
    store.drain()
    assert tier_of(lab, store, 1) == "disk"  # no layer was read: not promoted
    assert lab.is_right(store, 1)
    store.drain()
    assert tier_of(lab, store, 1) == "memory"
    assert lab.is_right(store, 1)


def test_a_chunk_of_which_some_layers_were_read_is_promoted_whole(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    reader = lab.open(store, 1)
    reader.read_layer(1, torch.zeros(lab.layout.layer_shape(1, lab.tokens)))
    reader.close()
    store.drain()
    assert tier_of(lab, store, 1) == "memory"
    assert lab.is_right(store, 1)


def test_a_layer_that_was_not_read_is_verified_before_it_is_promoted(lab, make_tiers):
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


def test_a_chunk_found_corrupt_is_counted_once(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    reader = lab.open(store, 1)
    os.truncate(lab.file(store.disk, 1), lab.entry_bytes - 1)
    reader.read_layer(0, torch.zeros(lab.layout.layer_shape(0, lab.tokens)))
    with pytest.raises(CorruptKVError):
        reader.read_layer(2, torch.zeros(lab.layout.layer_shape(2, lab.tokens)))
    reader.close()
    store.drain()
    assert store.stats().quarantined == 1


def test_memory_serves_when_the_file_is_gone(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    assert lab.is_right(store, 1)
    store.drain()
    lab.file(store.disk, 1).unlink()
    assert lab.is_right(store, 1)


def test_a_chunk_larger_than_memory_is_served_from_disk(lab, make_tiers):
    store = make_tiers(ram_bytes=CHUNK_BYTES - 1)
    lab.put(store, 1)
    assert lab.is_right(store, 1)
    store.drain()
    assert tier_of(lab, store, 1) == "disk"


def test_a_corrupt_chunk_is_never_promoted(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    reader = lab.open(store, 1)
    lab.read(reader)
    path = lab.file(store.disk, 1)
    with open(path, "r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff\xff\xff")
    reader.close()
    store.drain()
    assert not lab.has(store, 1)
    lab.put(store, 1)
    assert lab.is_right(store, 1)


def test_promotion_respects_the_memory_limit(lab, make_tiers):
    store = make_tiers(ram_bytes=2 * CHUNK_BYTES)
    for number in range(6):
        lab.put(store, number)
    for number in range(6):
        assert lab.is_right(store, number)
        store.drain()
        assert store.memory.stats().size_bytes <= 2 * CHUNK_BYTES
    assert [n for n in range(6) if store.memory.contains(lab.namespace, lab.key(n))] == [4, 5]


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


def test_uses_that_cannot_be_noted_do_not_end_the_promotions(lab, make_tiers, monkeypatch):
    monkeypatch.setattr(promotion, "RECENCY_INTERVAL_S", 0.01)
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


def test_the_tiers_say_that_nothing_can_be_stored(lab, make_tiers, monkeypatch):
    store = make_tiers()
    lab.put(store, 1)
    assert not store.read_only
    assert make_tiers(read_only=True).read_only
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode))
    found_out = make_tiers()
    assert found_out.read_only
    assert lab.is_right(found_out, 1)


def test_a_reader_open_during_delete_does_not_bring_the_chunk_back(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    reader = lab.open(store, 1)
    lab.read(reader)
    assert store.delete(lab.namespace, lab.key(1))
    reader.close()
    store.drain()
    assert lab.open(store, 1) is None


def test_what_is_in_memory_only_is_not_contained_and_is_put_again(lab, make_tiers):
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


def test_stats_count_a_hit_in_either_tier(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    assert lab.is_right(store, 1)
    store.drain()
    assert lab.is_right(store, 1)
    assert lab.open(store, 2) is None
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.entries) == (2, 1, 1)


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


def test_a_reader_is_closed_for_good(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    reader = lab.open(store, 1)
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        lab.read(reader)


def test_a_reader_works_in_another_thread(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    reader = lab.open(store, 1)
    outs = [torch.zeros(lab.layout.layer_shape(i, lab.tokens)) for i in range(3)]

    def load():
        for i, out in enumerate(outs):
            reader.read_layer(i, out)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert all(map(torch.equal, outs, lab.kv(1).layers))


def test_corruption_in_mid_query_raises_through_the_tiers(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    reader = lab.open(store, 1)
    os.truncate(lab.file(store.disk, 1), 4096)
    with pytest.raises(CorruptKVError):
        lab.read(reader)
    reader.close()
    assert lab.open(store, 1) is None


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
