"""The disk tier: what is put is read bit-exact, and the least recently used goes first."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from blendrag.errors import InvalidInputError, StoreFullError, StoreUnavailableError
from blendrag.store.base import KVReader
from blendrag.store.disk import DiskStore
from blendrag.store.kv import ChunkKV, KVLayout, LayerShape
from blendrag.store.memory import MemoryStore
from blendrag.store.payload import frame

DTYPES = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", ["disk", "memory"])
def test_what_was_put_is_read_bit_exact_into_a_prompt(lab, make_store, dtype, tier):
    layout = KVLayout(lab.layout.layers, dtype)
    memory = MemoryStore(1 << 20)
    kv = lab.put(make_store() if tier == "disk" else memory, 1, layout)
    reader = lab.open(make_store() if tier == "disk" else memory, 1, layout)
    assert isinstance(reader, KVReader)
    assert (reader.key, reader.tokens, reader.tier) == (lab.key(1), lab.tokens, tier)
    for read, put in zip(lab.read_into_prompt(reader, layout), kv.layers, strict=True):
        assert torch.equal(read.contiguous().view(torch.uint8), put.view(torch.uint8))


def test_more_heads_than_one_preadv_takes_are_read(lab, make_store):
    store, layout = make_store(), KVLayout((LayerShape(600, 2),), "float16")
    kv = lab.put(store, 1, layout, 3)
    (read,) = lab.read_into_prompt(lab.open(store, 1, layout, 3), layout, 3)
    assert torch.equal(read, kv.layers[0])


@pytest.mark.parametrize("encoding", ["native", "int8"])
def test_a_destination_of_another_shape_dtype_or_order_is_refused(lab, make_store, encoding):
    layout = lab.layout.encoded(encoding)
    for store in (make_store(), MemoryStore(1 << 20)):
        lab.put(store, 1, layout)
        for out in (
            torch.zeros(2, 2, 23, 8),
            torch.zeros(2, 2, 24, 8, dtype=torch.float16),
            torch.zeros(2, 24, 2, 8).transpose(1, 2),
            torch.zeros(2, 2, 8, 24).transpose(2, 3),
            torch.empty(2, 2, 24, 8, device="meta"),
        ):
            with pytest.raises(InvalidInputError, match="a layer was to be read into"):
                lab.open(store, 1, layout).read_layer(0, out)


def test_a_non_contiguous_kv_is_stored_by_value(lab, make_store):
    store, kv = make_store(), lab.kv(1)
    scattered = [layer.transpose(1, 2).contiguous().transpose(1, 2) for layer in kv.layers]
    store.put(lab.namespace, lab.key(1), ChunkKV(kv.layout, kv.tokens, scattered))
    assert lab.is_right(store, 1)


def test_namespaces_are_never_mixed(lab, store):
    other = lab.key("another model")
    store.put(other, lab.key(1), lab.kv(2))
    assert lab.is_right(store, 1)
    assert lab.gives(store.open(other, lab.key(1), lab.layout, lab.tokens), lab.kv(2))
    assert list(store.keys(other)) == [lab.key(1)]
    assert store.delete(other, lab.key(1))
    assert lab.is_right(store, 1)


def test_keys_delete_and_stats_agree(lab, filled, root):
    lab.put(filled, 1)  # again: nothing happens
    assert set(filled.keys(lab.namespace)) == {lab.key(number) for number in (1, 2, 3)}
    assert filled.delete(lab.namespace, lab.key(2))
    assert not filled.delete(lab.namespace, lab.key(2))
    assert not lab.has(filled, 2)
    assert lab.open(filled, 2) is None
    stats = filled.stats()
    assert (stats.entries, stats.size_bytes, stats.misses) == (2, 2 * lab.entry_bytes, 1)
    assert stats.size_bytes == sum(path.stat().st_size for path in lab.payloads(root))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_rejected_and_the_largest_numbers_are_not(
    lab, make_store, root, dtype, bad
):
    kv = lab.kv(1, KVLayout(lab.layout.layers, dtype))
    kv.layers[0].fill_(torch.finfo(kv.layout.torch_dtype).max)
    for store in (make_store(), MemoryStore(1 << 20)):
        store.put(lab.namespace, lab.key(1), kv)
    kv.layers[1][1, 1, 5, 3] = bad
    for store in (make_store(), MemoryStore(1 << 20)):
        with pytest.raises(InvalidInputError, match="layer 1"):
            store.put(lab.namespace, lab.key(2), kv)
    assert len(lab.payloads(root)) == 1


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_malformed_name_is_refused(lab, make_store, root, name):
    store = make_store()
    for use in (
        lambda: store.put(lab.namespace, name, lab.kv(1)),
        lambda: store.open(name, lab.key(1), lab.layout, lab.tokens),
        lambda: list(store.keys(name)),
        lambda: store.pin(lab.namespace, name),
    ):
        with pytest.raises(InvalidInputError, match="64 lowercase hex"):
            use()
    assert list((root / "pinned").iterdir()) == []


def test_a_reader_survives_deletion(lab, store):
    reader = lab.open(store, 1)
    store.delete(lab.namespace, lab.key(1))
    assert lab.gives(reader, lab.kv(1))
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        lab.read(reader)


def test_closing_a_store_leaves_no_temporaries_and_no_descriptors(lab, root):
    before = lab.descriptors()
    with contextlib.closing(DiskStore(root, 1 << 30)) as store:
        lab.put(store, 1)
        lab.open(store, 1).close()
        store.close()
    assert os.listdir(root / "tmp") == []
    assert lab.descriptors() <= before
    with pytest.raises(StoreUnavailableError, match="closed"):
        lab.open(store, 1)


def test_everything_in_the_store_is_private_to_its_owner(store, root):
    for path in [root, *root.rglob("*")]:
        if not path.name.startswith("index.db"):  # in a private directory, with the umask's mode
            assert path.stat().st_mode & 0o077 == 0, path


# -- eviction --------------------------------------------------------------------------------------


@pytest.fixture
def make_small(lab, make_store):
    """``make_small(chunks, *numbers)``: a store with room for so many chunks, and these put."""

    def make(chunks, *numbers):
        store = make_store(limit_bytes=chunks * lab.entry_bytes)
        for number in numbers:
            lab.put(store, number)
        return store

    return make


def stored(lab, store):
    return [number for number in range(6) if lab.has(store, number)]


def test_a_chunk_without_room_is_refused_and_nothing_evicted(lab, make_small):
    store = make_small(2, 1)
    with pytest.raises(StoreFullError) as caught:
        lab.put(store, 2, tokens=400)
    assert caught.value.needed_bytes > 2 * lab.entry_bytes
    for number in (1, 2):
        store.pin(lab.namespace, lab.key(number))
        lab.put(store, number)
    with pytest.raises(StoreFullError, match="raise disk_bytes"):
        lab.put(store, 3)
    assert lab.right(store) == [1, 2]


def test_the_most_recently_used_chunks_that_fit_are_kept(lab, make_store, root, monkeypatch):
    """Compared with a model; the clock jumps and the store is reopened, without effect."""
    generator = random.Random(1)
    sizes = {tokens: frame(lab.layout, tokens).file_bytes for tokens in (1, 24, 60, 200)}
    limit_bytes = sizes[200] + 3 * sizes[24]
    store, model = make_store(limit_bytes=limit_bytes), OrderedDict()
    for step in range(120):
        real = time.time()
        monkeypatch.setattr(time, "time", lambda now=real: now + generator.uniform(-1e6, 1e6))
        if step % 40 == 39:
            store.close()
            store = make_store(limit_bytes=limit_bytes)
        number = generator.randrange(25)
        tokens = list(sizes)[number % len(sizes)]
        if generator.random() < 0.4:
            reader = lab.open(store, number, tokens=tokens)
            assert (reader is not None) == (number in model), step
            if number in model:
                reader.close()
                model.move_to_end(number)
            continue
        if number not in model:
            while sum(model.values()) + sizes[tokens] > limit_bytes:
                model.popitem(last=False)
        lab.put(store, number, tokens=tokens)
        model[number] = sizes[tokens]
        model.move_to_end(number)
        assert {p.name[:64] for p in lab.payloads(root)} == {lab.key(n) for n in model}, step
        assert store.stats().size_bytes == sum(model.values()) <= limit_bytes


def test_entries_put_or_protected_within_a_scope_are_not_evicted(lab, make_small):
    store = make_small(3, 0, 1, 2)
    with store.pin_scope() as scope:
        scope.protect(lab.namespace, lab.key(0))
        lab.put(store, 1)  # there already: pinned all the same
        lab.put(store, 3)
        assert stored(lab, store) == [0, 1, 3]
        with pytest.raises(StoreFullError, match="raise disk_bytes") as caught:
            lab.put(store, 4)
        assert caught.value.needed_bytes == lab.entry_bytes
        assert stored(lab, store) == [0, 1, 3]
    lab.put(store, 4)
    assert stored(lab, store) == [1, 3, 4]


def test_what_another_thread_puts_within_a_scope_is_evicted_for_it(lab, make_small):
    """Requests store KV that they missed while an ingest runs, which must not fill the store for it."""
    store = make_small(3)
    with store.pin_scope(), ThreadPoolExecutor(1) as requests:
        lab.put(store, 0)
        for number in (1, 2, 3):
            requests.submit(lab.put, store, number).result()
        lab.put(store, 4)
        lab.put(store, 5)
        assert stored(lab, store) == [0, 4, 5]


@pytest.mark.parametrize("before_put", [False, True])
def test_a_pinned_entry_is_not_evicted_by_any_store_until_it_is_deleted(
    lab, make_small, root, before_put
):
    store, other = make_small(3), make_small(3)
    if before_put:
        store.pin(lab.namespace, lab.key(0))
    lab.put(store, 0)
    store.pin(lab.namespace, lab.key(0))
    for number in range(1, 5):
        lab.put(other, number)
    assert stored(lab, store) == [0, 3, 4]
    store.close()
    other.close()
    again = make_small(2)
    again.recover()  # reaches the smaller limit
    assert stored(lab, again) == [0, 4]
    lab.put(again, 5)
    assert lab.right(again) == [0, 5]
    assert again.delete(lab.namespace, lab.key(0))
    assert list((root / "pinned").iterdir()) == []
    for number in range(3):
        lab.put(again, number)
    assert stored(lab, again) == [1, 2]


def test_a_quarantined_entry_stays_pinned(lab, make_small):
    store = make_small(2, 0)
    store.pin(lab.namespace, lab.key(0))
    lab.file(store, 0).write_bytes(b"no payload")
    assert lab.open(store, 0) is None
    for number in range(3):
        lab.put(store, number)
    assert stored(lab, store) == [0, 2]
