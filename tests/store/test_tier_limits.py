"""Limits, order and counters of the tiers, and what the index costs in memory."""

import gc
import random
import threading
import time
import tracemalloc
from collections import OrderedDict

import pytest

from blendrag.errors import StoreFullError
from blendrag.store import DiskStore, MemoryStore, TieredStore
from blendrag.store import tiered as promotion
from blendrag.store.index import Index, Row
from blendrag.store.payload import frame
from blendrag.store.payload_files import new_name

CHUNK_BYTES = 3 * 2 * 16 * 24 * 4
#: The paper's: 16 MB for a million chunks, beyond SQLite's own cache.
INDEX_BYTES_PER_CHUNK = 16


@pytest.fixture
def make_tiers(root):
    opened = []

    def make(ram_bytes=1 << 20, disk_bytes=1 << 30):
        opened.append(TieredStore(MemoryStore(ram_bytes), DiskStore(root, disk_bytes)))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def put(lab, store, number, tokens):
    store.put(lab.namespace, lab.key(number), lab.kv(number, tokens=tokens))


def use(lab, store, number, tokens):
    reader = store.open(lab.namespace, lab.key(number), lab.layout, tokens)
    if reader is not None:
        lab.read(reader, tokens=tokens)
        reader.close()
    return reader is not None


# -- limits and order -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_a_disk_of_chunks_of_any_length_keeps_the_most_recent_that_fit(
    lab, make_store, root, monkeypatch, seed
):
    """Against a model: an ordered dictionary, and a clock that nobody should look at."""
    generator = random.Random(seed)
    sizes = {tokens: frame(lab.layout, tokens).file_bytes for tokens in (1, 24, 60, 200)}
    limit_bytes = sizes[200] + 3 * sizes[24]
    store, model = make_store(limit_bytes=limit_bytes), OrderedDict()
    for step in range(120):
        real = time.time()
        monkeypatch.setattr(time, "time", lambda now=real: now + generator.uniform(-1e6, 1e6))
        number = generator.randrange(25)
        tokens = list(sizes)[number % len(sizes)]
        if generator.random() < 0.4:
            assert use(lab, store, number, tokens) == (number in model), step
            if number in model:
                model.move_to_end(number)
            continue
        if number not in model:
            while sum(model.values()) + sizes[tokens] > limit_bytes:
                model.popitem(last=False)
        put(lab, store, number, tokens)
        model[number] = sizes[tokens]
        model.move_to_end(number)
        assert {p.name[:64] for p in lab.payloads(root)} == {lab.key(n) for n in model}, step
        assert store.stats().size_bytes == sum(model.values()) <= limit_bytes


def test_memory_never_holds_more_than_its_limit_whoever_promotes(lab):
    store = MemoryStore(int(3.5 * CHUNK_BYTES))
    kvs = {number: lab.kv(number, tokens=24 if number % 3 else 48) for number in range(60)}
    seen = []

    def fill(numbers):
        for number in numbers:
            store.put(lab.namespace, lab.key(number), kvs[number])
            seen.append(store.stats().size_bytes)

    threads = [threading.Thread(target=fill, args=(range(n, 60, 3),)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 60
    assert max(seen) <= store.limit_bytes
    assert store.stats().size_bytes == sum(b.data.nbytes for b in store._blocks.values())
    assert store.stats().size_bytes + 2 * CHUNK_BYTES > store.limit_bytes


def test_a_store_without_room_for_anything_still_serves_misses(lab, make_tiers):
    store = make_tiers(ram_bytes=0, disk_bytes=0)
    with pytest.raises(StoreFullError):
        lab.put(store, 1)
    assert lab.open(store, 1) is None
    assert store.stats().size_bytes == 0


# -- the queue of promotions ----------------------------------------------------------------------


def test_a_full_queue_leaves_chunks_on_disk_and_counts_them(lab, make_tiers, monkeypatch):
    store = make_tiers()
    at_work, go_on = threading.Event(), threading.Event()
    real = promotion.Promotion._promote

    def slow(self, job):
        at_work.set()
        assert go_on.wait(30)
        real(self, job)

    monkeypatch.setattr(promotion.Promotion, "_promote", slow)
    count = promotion.QUEUE_CHUNKS + 9
    for number in range(count):
        lab.put(store, number)
    assert lab.is_right(store, 0)
    assert at_work.wait(10)
    descriptors = lab.descriptors()
    for number in range(1, count):
        assert lab.is_right(store, number)
    assert store.stats().queue_drops == count - 1 - promotion.QUEUE_CHUNKS
    assert lab.descriptors() == descriptors + promotion.QUEUE_CHUNKS  # one of each that waits
    go_on.set()
    store.drain()
    assert store.stats().promotions == 1 + promotion.QUEUE_CHUNKS
    assert lab.open(store, count - 1).tier == "disk"
    assert lab.is_right(store, count - 1)
    store.drain()
    assert lab.open(store, count - 1).tier == "memory"


def test_closing_drains_the_queue(lab, make_tiers, monkeypatch):
    store = make_tiers()
    promoted, real = [], promotion.Promotion._promote

    def slow(self, job):
        time.sleep(0.02)
        real(self, job)
        promoted.append(job.key)

    monkeypatch.setattr(promotion.Promotion, "_promote", slow)
    for number in range(6):
        lab.put(store, number)
        assert lab.is_right(store, number)
    store.close()
    assert promoted == [lab.key(number) for number in range(6)]


# -- counters -------------------------------------------------------------------------------------


def test_what_happened_in_each_tier_is_counted_there(lab, make_tiers):
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


def test_bytes_that_were_not_what_was_put_count_as_quarantined_and_not_as_read(lab, make_tiers):
    store = make_tiers()
    lab.put(store, 1)
    data = bytearray(lab.file(store.disk, 1).read_bytes())
    data[4100] ^= 1
    lab.file(store.disk, 1).write_bytes(data)
    reader = lab.open(store, 1)
    with pytest.raises(Exception, match="set aside"):
        lab.read(reader)
    reader.close()
    stats = store.stats()
    assert (stats.quarantined, stats.tiers[1].read_bytes, stats.promotions) == (1, 0, 0)


# -- what the index costs -------------------------------------------------------------------------


def bytes_of_an_index_in_use(lab, directory, chunks):
    """Python's own, at most, over opening, look-ups, uses, counting, and a search for the oldest.

    SQLite allocates its pages itself, which Python does not see.
    """
    directory.mkdir()
    names = [new_name(lab.namespace, lab.key(number)) for number in range(chunks)]
    index = Index(directory)
    with index.exclusive():
        index.rebuild(lambda: None)
        with index.transaction():
            for name in names:
                index.add(Row(name, 1000))
    index.close()
    asked = [name.entry for name in names[:: chunks // 200]]
    gc.collect()
    tracemalloc.start()
    try:
        index = Index(directory)
        with index.exclusive():
            index.open()
            assert index.totals() == (chunks, 1000 * chunks)
            assert all(index.get(*entry) is not None for entry in asked)
            index.touch(asked)
            assert sum(1 for _ in index.oldest()) == chunks
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        index.close()


def test_the_index_takes_no_more_memory_for_more_chunks(lab, tmp_path):
    few, many = 1000, 9000
    grown = bytes_of_an_index_in_use(lab, tmp_path / "many", many)
    grown -= bytes_of_an_index_in_use(lab, tmp_path / "few", few)
    assert grown / (many - few) < INDEX_BYTES_PER_CHUNK
