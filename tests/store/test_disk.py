"""The disk tier: what is put is read bit-exact, and the least recently used goes first."""

from __future__ import annotations

import os
import random
import time
from collections import OrderedDict

import pytest
import torch

from blendrag.errors import InvalidInputError, StoreFullError, StoreUnavailableError
from blendrag.store import DiskStore, KVReader
from blendrag.store.kv import ChunkKV, KVLayout, LayerShape
from blendrag.store.payload import frame

#: The paper's: 16 MB for a million chunks.
INDEX_BYTES_PER_CHUNK = 16


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_was_put_is_read_bit_exact_after_reopening(lab, make_store, dtype):
    layout = KVLayout(lab.layout.layers, dtype)
    kv = lab.kv(1, layout)
    make_store().put(lab.namespace, lab.key(1), kv)
    reader = make_store().open(lab.namespace, lab.key(1), layout, lab.tokens)
    assert isinstance(reader, KVReader)
    assert (reader.key, reader.tokens, reader.tier) == (lab.key(1), lab.tokens, "disk")
    for read, put in zip(lab.read(reader, layout), kv.layers, strict=True):
        assert torch.equal(read.view(torch.uint8), put.view(torch.uint8))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_layer_is_read_into_the_middle_of_a_prompt_and_nothing_else_changes(
    lab, make_store, dtype
):
    store = make_store()
    layout = KVLayout(lab.layout.layers, dtype)
    kv = lab.kv(1, layout)
    store.put(lab.namespace, lab.key(1), kv)
    reader = store.open(lab.namespace, lab.key(1), layout, lab.tokens)
    for i, shape in enumerate(layout.layers):
        prompt = torch.full((2, shape.kv_heads, 60, shape.head_dim), 7.0, dtype=layout.torch_dtype)
        reader.read_layer(i, prompt[:, :, 11 : 11 + lab.tokens])
        assert torch.equal(prompt[:, :, 11 : 11 + lab.tokens], kv.layers[i])
        assert (prompt[:, :, :11] == 7).all()
        assert (prompt[:, :, 11 + lab.tokens :] == 7).all()


def test_more_heads_than_one_preadv_takes_are_read(lab, make_store):
    store = make_store()
    layout = KVLayout((LayerShape(600, 2),), "float16")
    kv = lab.kv(1, layout, 3)
    store.put(lab.namespace, lab.key(1), kv)
    prompt = torch.zeros(2, 600, 5, 2, dtype=torch.float16)
    store.open(lab.namespace, lab.key(1), layout, 3).read_layer(0, prompt[:, :, 1:4])
    assert torch.equal(prompt[:, :, 1:4], kv.layers[0])


def test_a_destination_of_another_shape_dtype_or_order_is_refused(lab, store):
    reader = lab.open(store, 1)
    for out in (
        torch.zeros(2, 2, 23, 8),
        torch.zeros(2, 2, 24, 8, dtype=torch.float16),
        torch.zeros(2, 24, 2, 8).transpose(1, 2),
        torch.zeros(2, 2, 8, 24).transpose(2, 3),
        torch.empty(2, 2, 24, 8, device="meta"),
    ):
        with pytest.raises(InvalidInputError, match="a layer was to be read into"):
            reader.read_layer(0, out)


def test_a_non_contiguous_kv_is_stored_by_value(lab, make_store):
    store = make_store()
    kv = lab.kv(1)
    scattered = [layer.transpose(1, 2).contiguous().transpose(1, 2) for layer in kv.layers]
    store.put(lab.namespace, lab.key(1), ChunkKV(kv.layout, kv.tokens, scattered))
    assert lab.is_right(store, 1)


def test_an_absent_key_is_a_miss(lab, make_store):
    store = make_store()
    assert lab.open(store, 1) is None
    assert not lab.has(store, 1)
    assert store.stats().misses == 1


def test_namespaces_are_never_mixed(lab, make_store):
    store = make_store()
    other = lab.key("another model")
    lab.put(store, 1)
    store.put(other, lab.key(1), lab.kv(2))
    assert lab.is_right(store, 1)
    reader = store.open(other, lab.key(1), lab.layout, lab.tokens)
    assert torch.equal(lab.read(reader)[0], lab.kv(2).layers[0])
    assert list(store.keys(other)) == [lab.key(1)]
    assert store.delete(other, lab.key(1))
    assert lab.is_right(store, 1)


def test_putting_a_key_again_is_a_no_op(lab, store, root):
    before = lab.payloads(root)
    lab.put(store, 1)
    assert lab.payloads(root) == before
    assert store.stats().entries == 1


def test_keys_delete_and_stats_agree(lab, make_store, root):
    store = make_store()
    for number in range(5):
        lab.put(store, number)
    assert set(store.keys(lab.namespace)) == {lab.key(number) for number in range(5)}
    assert store.delete(lab.namespace, lab.key(2))
    assert not store.delete(lab.namespace, lab.key(2))
    assert not lab.has(store, 2)
    stats = store.stats()
    assert (stats.entries, stats.size_bytes) == (4, 4 * lab.entry_bytes)
    assert stats.size_bytes == sum(path.stat().st_size for path in lab.payloads(root))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nan_and_infinity_are_rejected_with_the_layer_named(lab, make_store, root, dtype, bad):
    layout = KVLayout(lab.layout.layers, dtype)
    kv = lab.kv(1, layout)
    kv.layers[1][1, 1, 5, 3] = bad
    with pytest.raises(InvalidInputError, match="layer 1"):
        make_store().put(lab.namespace, lab.key(1), kv)
    assert lab.payloads(root) == []


def test_the_largest_finite_numbers_are_stored(lab, make_store):
    store = make_store()
    for number, dtype in enumerate(["float32", "float16", "bfloat16"]):
        layout = KVLayout(lab.layout.layers, dtype)
        kv = lab.kv(1, layout)
        kv.layers[0].fill_(torch.finfo(layout.torch_dtype).max)
        store.put(lab.namespace, lab.key(number), kv)
        assert store.contains(lab.namespace, lab.key(number))


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_malformed_key_is_refused(lab, make_store, name):
    store = make_store()
    with pytest.raises(InvalidInputError, match="64 lowercase hex"):
        store.put(lab.namespace, name, lab.kv(1))
    with pytest.raises(InvalidInputError, match="64 lowercase hex"):
        store.open(name, lab.key(1), lab.layout, lab.tokens)


def test_a_reader_survives_eviction_and_deletion(lab, store):
    reader = lab.open(store, 1)
    store.delete(lab.namespace, lab.key(1))
    assert all(map(torch.equal, lab.read(reader), lab.kv(1).layers))
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read_layer(0, torch.zeros(2, 2, lab.tokens, 8))


def test_closing_a_store_leaves_no_temporaries_and_no_descriptors(lab, root):
    before = lab.descriptors()
    store = DiskStore(root, 1 << 30)
    lab.put(store, 1)
    lab.open(store, 1).close()
    store.close()
    store.close()
    assert os.listdir(root / "tmp") == []
    assert lab.descriptors() == before
    with pytest.raises(StoreUnavailableError, match="closed"):
        lab.open(store, 1)


def test_everything_in_the_store_is_private_to_its_owner(lab, make_store, root):
    lab.put(make_store(), 1)
    for path in [root, *root.rglob("*")]:
        if not path.name.startswith(
            "index.db"
        ):  # in a directory of mode 0700, with the umask's mode
            assert path.stat().st_mode & 0o077 == 0, path


# -- eviction --------------------------------------------------------------------------------------


def stored(lab, store, numbers):
    return [number for number in numbers if lab.has(store, number)]


def put_tokens(lab, store, number, tokens):
    store.put(lab.namespace, lab.key(number), lab.kv(number, tokens=tokens))


def use(lab, store, number, tokens):
    reader = store.open(lab.namespace, lab.key(number), lab.layout, tokens)
    if reader is not None:
        lab.read(reader, tokens=tokens)
        reader.close()
    return reader is not None


def test_an_entry_larger_than_the_limit_is_refused_and_nothing_evicted(lab, make_store):
    store = make_store(limit_bytes=2 * lab.entry_bytes)
    lab.put(store, 1)
    big = lab.kv(2, tokens=400)
    with pytest.raises(StoreFullError) as caught:
        store.put(lab.namespace, lab.key(2), big)
    assert caught.value.needed_bytes > 2 * lab.entry_bytes
    assert lab.is_right(store, 1)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_most_recently_used_chunks_that_fit_are_kept(lab, make_store, root, monkeypatch, seed):
    """Compared with a model; the clock jumps, and has no effect."""
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
        put_tokens(lab, store, number, tokens)
        model[number] = sizes[tokens]
        model.move_to_end(number)
        assert {p.name[:64] for p in lab.payloads(root)} == {lab.key(n) for n in model}, step
        assert store.stats().size_bytes == sum(model.values()) <= limit_bytes


def test_uses_survive_reopening(lab, make_store):
    store = make_store(limit_bytes=3 * lab.entry_bytes)
    for number in range(3):
        lab.put(store, number)
    lab.open(store, 0).close()
    store.close()
    again = make_store(limit_bytes=3 * lab.entry_bytes)
    lab.put(again, 3)
    assert stored(lab, again, range(4)) == [0, 2, 3]


def test_entries_put_within_a_scope_are_not_evicted(lab, make_store):
    store = make_store(limit_bytes=3 * lab.entry_bytes)
    lab.put(store, 0)
    with store.pin_scope():
        for number in (1, 2, 3):
            lab.put(store, number)
        assert stored(lab, store, range(4)) == [1, 2, 3]
        with pytest.raises(StoreFullError, match="--disk-bytes") as caught:
            lab.put(store, 4)
        assert caught.value.needed_bytes == lab.entry_bytes
        assert all(lab.is_right(store, number) for number in (1, 2, 3))
    lab.put(store, 4)
    assert stored(lab, store, range(5)) == [2, 3, 4]


def test_a_scope_protects_existing_entries(lab, make_store):
    store = make_store(limit_bytes=3 * lab.entry_bytes)
    for number in range(3):
        lab.put(store, number)
    with store.pin_scope() as scope:
        scope.protect(lab.namespace, lab.key(0))
        lab.put(store, 1)  # there already: pinned all the same
        lab.put(store, 3)
        assert stored(lab, store, range(4)) == [0, 1, 3]


def test_a_smaller_limit_is_reached_by_recover(lab, make_store, root):
    store = make_store()
    for number in range(5):
        lab.put(store, number)
    store.close()
    smaller = make_store(limit_bytes=2 * lab.entry_bytes)
    smaller.recover()
    assert stored(lab, smaller, range(5)) == [3, 4]
    assert len(lab.payloads(root)) == 2


@pytest.mark.parametrize("before_put", [False, True])
def test_a_pinned_entry_is_not_evicted_by_any_store(lab, make_store, before_put):
    store, other = (make_store(limit_bytes=3 * lab.entry_bytes) for _ in range(2))
    if before_put:
        store.pin(lab.namespace, lab.key(0))
    lab.put(store, 0)
    store.pin(lab.namespace, lab.key(0))
    for number in range(1, 5):
        lab.put(other, number)
    assert stored(lab, store, range(5)) == [0, 3, 4]
    store.close()
    other.close()
    again = make_store(limit_bytes=2 * lab.entry_bytes)
    again.recover()
    lab.put(again, 5)
    assert stored(lab, again, range(6)) == [0, 5]
    assert lab.is_right(again, 0)


def test_deleting_an_entry_removes_its_pin(lab, make_store, root):
    store = make_store(limit_bytes=2 * lab.entry_bytes)
    lab.put(store, 0)
    store.pin(lab.namespace, lab.key(0))
    assert store.delete(lab.namespace, lab.key(0))
    assert list((root / "pinned").iterdir()) == []
    for number in range(3):
        lab.put(store, number)
    assert stored(lab, store, range(3)) == [1, 2]


def test_a_quarantined_entry_stays_pinned(lab, make_store):
    store = make_store(limit_bytes=2 * lab.entry_bytes)
    lab.put(store, 0)
    store.pin(lab.namespace, lab.key(0))
    lab.file(store, 0).write_bytes(b"no payload")
    assert lab.open(store, 0) is None
    for number in range(3):
        lab.put(store, number)
    assert stored(lab, store, range(3)) == [0, 2]


def test_when_only_pinned_entries_are_left_the_store_is_full(lab, make_store):
    store = make_store(limit_bytes=lab.entry_bytes)
    lab.put(store, 0)
    store.pin(lab.namespace, lab.key(0))
    with pytest.raises(StoreFullError, match="--disk-bytes"):
        lab.put(store, 1)
    assert lab.is_right(store, 0)


def test_a_malformed_key_or_a_read_only_store_is_not_pinned(lab, make_store, root):
    with pytest.raises(InvalidInputError, match="no key"):
        make_store().pin(lab.namespace, "../../format")
    with pytest.raises(StoreUnavailableError, match="read-only"):
        make_store(read_only=True).pin(lab.namespace, lab.key(1))
    assert list((root / "pinned").iterdir()) == []
