"""A reader beyond small layers: large ones in portions, and what it is asked about its file."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from blendrag.errors import CorruptKVError
from blendrag.store import MemoryStore, TieredStore
from blendrag.store.kv import KVLayout, LayerShape
from blendrag.store.reader import PORTION_BYTES, portions

LAYOUT = KVLayout((LayerShape(4, 64), LayerShape(4, 64)), "float32")
TOKENS = 601
LAYER_BYTES = 2 * 4 * TOKENS * 64 * 4


@pytest.fixture
def put(lab, make_store):
    """A chunk whose layers take several portions, and no whole number of them."""
    assert LAYER_BYTES > 2 * PORTION_BYTES
    assert LAYER_BYTES % PORTION_BYTES
    kv, store = lab.kv(1, LAYOUT, TOKENS), make_store()
    store.put(lab.namespace, lab.key(1), kv)
    return kv, store


def opened(lab, store):
    return store.open(lab.namespace, lab.key(1), LAYOUT, TOKENS)


def test_a_large_layer_is_read_into_contiguous_memory(lab, put):
    kv, store = put
    reader = opened(lab, store)
    assert all(map(torch.equal, lab.read(reader, LAYOUT, TOKENS), kv.layers))
    reader.close()


def test_a_large_layer_is_read_into_a_prompts_buffer_and_nothing_beside_it_is_touched(lab, put):
    kv, store = put
    reader = opened(lab, store)
    prompt = torch.full((2, 4, TOKENS + 30, 64), 7.0)
    for layer, expected in enumerate(kv.layers):
        reader.read_layer(layer, prompt[:, :, 10 : 10 + TOKENS])
        assert torch.equal(prompt[:, :, 10 : 10 + TOKENS], expected)
    assert (prompt[:, :, :10] == 7.0).all()
    assert (prompt[:, :, 10 + TOKENS :] == 7.0).all()
    reader.close()


@pytest.mark.parametrize("portion", range(3))
def test_a_bit_that_is_wrong_in_any_portion_of_a_layer_is_noticed(lab, put, portion):
    _, store = put
    path = lab.file(store, 1)
    data = bytearray(path.read_bytes())
    data[len(data) - LAYER_BYTES + portion * PORTION_BYTES] ^= 1
    path.write_bytes(data)
    reader = opened(lab, store)
    reader.read_layer(0, torch.empty(2, 4, TOKENS, 64))
    with pytest.raises(CorruptKVError, match="not those that were put"):
        reader.read_layer(1, torch.empty(2, 4, TOKENS, 64))
    assert opened(lab, store) is None


def test_a_large_layer_cut_off_between_portions_while_it_is_open_is_noticed(lab, put):
    _, store = put
    path, reader = lab.file(store, 1), opened(lab, store)
    os.truncate(path, path.stat().st_size - LAYER_BYTES + PORTION_BYTES)
    with pytest.raises(CorruptKVError, match="shorter than what was put"):
        reader.read_layer(1, torch.empty(2, 4, TOKENS, 64))


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [1],
        [PORTION_BYTES],
        [PORTION_BYTES + 1],
        [PORTION_BYTES - 1, 1, 1],
        [1000] * 1200,
        [3 * PORTION_BYTES],
    ],
)
def test_portions_are_all_of_the_buffers_in_order_and_none_is_larger_than_it_may_be(sizes):
    buffers = [bytearray(os.urandom(size)) for size in sizes]
    found = list(portions([memoryview(buffer) for buffer in buffers]))
    lengths = [sum(map(len, portion)) for portion in found]
    assert all(length == PORTION_BYTES for length in lengths[:-1])
    assert all(0 < length <= PORTION_BYTES for length in lengths)
    assert b"".join(b"".join(portion) for portion in found) == b"".join(buffers)


# -- is it in memory ------------------------------------------------------------------------------


def test_a_file_just_written_is_in_the_page_cache(lab, put):
    reader = opened(lab, put[1])
    assert reader.is_cached()
    reader.close()
    assert reader.is_cached()  # of a file that is closed nothing is known


@pytest.mark.parametrize("in_tiers", [False, True])
@pytest.mark.parametrize(
    ("code", "is_cached"), [(errno.EAGAIN, False), (errno.EOPNOTSUPP, True), (errno.EIO, True)]
)
def test_only_a_kernel_that_would_have_to_wait_says_that_a_file_is_not_cached(
    lab, put, monkeypatch, code, is_cached, in_tiers
):
    store = TieredStore(MemoryStore(1 << 24), put[1]) if in_tiers else put[1]
    reader = opened(lab, store)
    asked = []

    def answer(fd, buffers, offset, flags=0):
        asked.append(flags)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", answer)
        assert reader.is_cached() == is_cached
    assert asked == [os.RWF_NOWAIT]
    reader.close()


def test_where_the_system_cannot_be_asked_a_file_counts_as_cached(lab, put, monkeypatch):
    reader = opened(lab, put[1])
    monkeypatch.delattr(os, "RWF_NOWAIT")
    assert reader.is_cached()
    reader.close()
