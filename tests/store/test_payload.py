"""Payload files: their header, reading them in portions, and damage, which is always a miss."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import struct
from contextlib import closing
from functools import partial

import pytest
import torch
from kv_lab import Lab
from safetensors.torch import load_file

from blendrag.errors import CorruptKVError, InvalidInputError
from blendrag.store.kv import ChunkKV, KVLayout, LayerShape, StateShape
from blendrag.store.memory import MemoryStore
from blendrag.store.payload import (
    ALIGNMENT_BYTES,
    frame,
    layer_checksum,
    layer_seed,
    open_payload,
    parse_header,
    read_header,
    verified_pieces,
)
from blendrag.store.payload_files import QUARANTINE_FILES, Name
from blendrag.store.reader import PORTION_BYTES, portions
from blendrag.store.tiered import KVStore


@pytest.fixture
def expected(lab):
    return frame(lab.layout, lab.tokens)


@pytest.fixture
def header(lab, expected):
    """The header of chunk 1, with checksums 1, 2 and 3."""
    return expected.header(lab.namespace, lab.key(1), [1, 2, 3])


# -- the header ------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["native", "int8"])
def test_a_payload_holds_bytes_of_running_states_beside_kv(lab, make_store, encoding):
    layout = KVLayout((StateShape(50), LayerShape(2, 4), StateShape(7)), "bfloat16", encoding)
    layers = [
        torch.randint(0, 256, layout.layer_shape(i, 9)).to(layout.layer_dtype(i)) for i in range(3)
    ]
    store = make_store()
    store.put(lab.namespace, lab.key(4), ChunkKV(layout, 9, layers))
    with closing(store.open(lab.namespace, lab.key(4), layout, 9)) as reader:
        for i in (0, 2):
            read = torch.empty_like(layers[i])
            reader.read_layer(i, read)
            assert torch.equal(read, layers[i])
    with lab.file(store, 4).open("rb") as file:
        found = read_header(file.read, lab.namespace, lab.key(4), lab.file(store, 4).stat().st_size)
    assert (found.layout, found.tokens) == (layout, 9)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_safetensors_reads_a_payload(lab, make_store, dtype):
    store = make_store()
    kv = lab.put(store, 3, KVLayout(lab.layout.layers, dtype))
    tensors = load_file(lab.file(store, 3))
    assert list(tensors) == ["l0000", "l0001", "l0002"]
    assert all(map(torch.equal, tensors.values(), kv.layers))


def test_the_header_fills_a_page_and_says_what_the_file_holds(lab, expected, header):
    assert len(header) == expected.header_bytes
    assert len(header) % ALIGNMENT_BYTES == 0
    assert json.loads(header[8:])["__metadata__"] == {
        "key": lab.key(1),
        "namespace": lab.namespace,
        "tokens": str(lab.tokens),
        "dtype": "float32",
        "blendrag_format": "1",
        "checksums": "".join(f"{i:016x}" for i in (1, 2, 3)),
    }
    found = parse_header(header)
    assert (found.namespace, found.key) == (lab.namespace, lab.key(1))
    assert (found.layout, found.tokens) == (lab.layout, lab.tokens)
    assert found.file_bytes == lab.entry_bytes


def test_checksums_depend_on_key_and_layer(lab):
    data = b"x" * 1000
    sums = {layer_checksum(lab.key(k), layer, data) for k in range(4) for layer in range(4)}
    assert len(sums) == 16
    assert layer_seed("f" * 64, 1) < 1 << 64


def test_a_header_of_another_layout_tokens_key_or_namespace_is_refused(lab, expected, header):
    mine, other = (lab.namespace, lab.key(1)), KVLayout(lab.layout.layers[:2], "float32")
    assert expected.checksums(header, *mine) == [1, 2, 3]
    assert expected.checksums(header, lab.namespace, lab.key(2)) is None
    assert expected.checksums(header, lab.key(1), lab.key(1)) is None
    assert frame(lab.layout, 25).checksums(header, *mine) is None
    assert frame(other, lab.tokens).checksums(header, *mine) is None


def test_every_changed_header_byte_outside_the_checksums_is_refused(lab, expected, header):
    start = len(expected.fixed[0])
    for position in range(0, len(header), 7):
        if start <= position < start + 48:
            continue
        changed = bytearray(header)
        changed[position] ^= 0x11
        assert expected.checksums(bytes(changed), lab.namespace, lab.key(1)) is None
        assert parse_header(bytes(changed)) is None
    for digits in (b"+00000000000001f", b"0_00000000000001", b"0X0000000000001f", b"F" * 16):
        changed = header[:start] + digits + header[start + 16 :]
        assert expected.checksums(changed, lab.namespace, lab.key(1)) is None


def test_parsing_refuses_hostile_headers(header):
    deep = b'{"__metadata__":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    duplicate = header[8:].replace(b'{"__metadata__"', b'{"l0000":1,"__metadata__"', 1)
    huge = header[8:].replace(b'"tokens":"24"', b'"tokens":"9999999999999999999"', 1)
    endless = header[8:].replace(b'"tokens":"24"', b'"tokens":1e999', 1)
    assert endless != header[8:]
    odd = (b"", b"{}", b"[]", b"null", b"\xff\xfe", b" " * (1 << 20))
    for text in (deep, duplicate, huge, endless, *odd):
        assert parse_header(struct.pack("<Q", len(text)) + text) is None
    assert parse_header(header[:-1]) is None
    assert parse_header(b"") is None


def test_a_layout_that_cannot_be_stored_is_refused(lab):
    with pytest.raises(InvalidInputError, match="0 tokens"):
        frame(lab.layout, 0)
    with pytest.raises(InvalidInputError, match="too many layers"):
        frame(KVLayout((LayerShape(1, 1),) * 20_000, "float32"), 1)


# -- damage ----------------------------------------------------------------------------------------


def overwrite(offset, data):
    def change(path):
        with open(path, "r+b") as file:
            file.seek(offset % path.stat().st_size)
            file.write(data)

    return change


def resize(change):
    return lambda path: os.truncate(path, max(0, path.stat().st_size + change))


def swap_layers(path):
    """The first two layers, which have equal shapes, together with their checksums."""
    data, size = path.read_bytes(), 2 * 2 * 24 * 8 * 4
    sums = data.index(b'"checksums":"') + len(b'"checksums":"')
    digits, layers = data[sums : sums + 32], data[4096 : 4096 + 2 * size]
    overwrite(sums, digits[16:] + digits[:16])(path)
    overwrite(4096, layers[size:] + layers[:size])(path)


def replace_by_fifo(path):
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path):
    elsewhere = path.parents[4] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


LENGTHS = (0, 1, 4087, 4089, (1 << 20) + 1, 1 << 63, (1 << 64) - 1)
DAMAGE = {
    **{
        f"flipped bit at {at}": partial(Lab.flip, offset=at)
        for at in (0, 7, 8, 100, 4000, 4096, 9000, -1)
    },
    **{f"resized by {change}": resize(change) for change in (-1, -5000, -(1 << 20), 1, 4096)},
    **{f"header length {n}": overwrite(0, struct.pack("<Q", n)) for n in LENGTHS},
    "deep JSON": overwrite(8, b'{"a":' * 400),
    "duplicate names": overwrite(8, b'{"l0000":0,"l0000":1}'),
    "another format": overwrite(8, b'{"__metadata__":{"blendrag_format":"2"}}'),
    "no text": overwrite(8, b"\xff" * 2000),
    "swapped layers": swap_layers,
    "a FIFO": replace_by_fifo,
    "a symbolic link": replace_by_link,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_and_set_aside_until_the_next_put(lab, store, damage, caplog):
    with caplog.at_level(logging.WARNING, "blendrag.store"):
        DAMAGE[damage](lab.file(store, 1))
        reader = lab.open(store, 1)
        if reader is not None:
            with pytest.raises(CorruptKVError):
                lab.read(reader)
    assert len(caplog.records) == store.stats().quarantined == 1
    assert lab.open(store, 1) is None
    assert not lab.has(store, 1)
    assert lab.payloads(store.root) == []
    lab.put(store, 1)
    assert lab.is_right(store, 1)


def test_swapped_files_are_misses(lab, filled):
    one, two = lab.file(filled, 1), lab.file(filled, 2)
    one.rename(one.with_suffix(".first"))
    two.rename(one)
    one.with_suffix(".first").rename(two)
    assert lab.open(filled, 1) is None
    assert lab.open(filled, 2) is None
    assert filled.stats().quarantined == 2


def test_a_linked_directory_is_not_followed(lab, store, tmp_path):
    directory = lab.file(store, 1).parent
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(tmp_path / "elsewhere")
    assert lab.open(store, 1) is None
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_a_vanished_file_is_a_miss_and_put_writes_it_again(lab, store):
    lab.file(store, 1).unlink()
    assert lab.open(store, 1) is None
    assert store.stats().entries == 0
    lab.put(store, 1)
    assert lab.is_right(store, 1)


def test_the_quarantine_keeps_only_the_newest_files(lab, make_store, root):
    store = make_store()
    for number in range(QUARANTINE_FILES + 2):
        lab.put(store, number)
        os.truncate(lab.file(store, number), 10)
        assert lab.open(store, number) is None
    kept = {path.name[:64] for path in (root / "quarantine").glob("*.kv")}
    assert kept == {lab.key(number) for number in range(2, QUARANTINE_FILES + 2)}


@pytest.mark.parametrize("is_held", [False, True])
def test_a_damaged_file_that_cannot_be_moved_is_replaced_by_the_next_put(
    lab, make_store, store, root, monkeypatch, failing, held, is_held
):
    lab.flip(lab.file(store, 1))
    index = held() if is_held else contextlib.nullcontext()  # if held, its row stays, too
    with failing("rename"), index, pytest.raises(CorruptKVError):
        lab.read(lab.open(store, 1))
    assert lab.file(store, 1).exists()
    last = Name(lab.namespace, lab.key(1), "f" * 16)  # a rebuild meets the other one first
    monkeypatch.setattr("blendrag.store.disk.new_name", lambda namespace, key: last)
    lab.put(store, 1)
    assert [path.name for path in lab.payloads(root)] == [last.file]
    store.close()
    lab.drop_index(root)
    assert lab.is_right(make_store(), 1)


def test_a_payload_cut_while_it_is_read_or_verified_is_noticed(lab, store):
    name = store.find(lab.namespace, lab.key(1))
    reader = lab.open(store, 1)
    with open_payload(store._files, name) as (found, read):
        os.truncate(lab.file(store, 1), found.file_bytes - 100)
        with pytest.raises(CorruptKVError, match="layer 2 ends 100 bytes early"):
            list(verified_pieces(found, read))
    with pytest.raises(CorruptKVError, match="shorter"):
        lab.read(reader)
    assert lab.open(store, 1) is None
    assert store.stats().quarantined == 1


# -- errors of the system ---------------------------------------------------------------------------


def test_a_query_out_of_descriptors_is_a_miss_and_not_the_fault_of_the_file(lab, store, failing):
    with failing("open", ".kv", errno.EMFILE):
        assert lab.open(store, 1) is None
    assert store.stats().quarantined == 0
    assert lab.is_right(store, 1)


def test_a_directory_that_cannot_be_listed_is_a_miss_with_a_warning(
    lab, store, make_store, failing, caplog
):
    reader = make_store(read_only=True)
    with failing("listdir"), caplog.at_level(logging.WARNING, "blendrag.store"):
        assert lab.open(reader, 1) is None
    assert "cannot be looked for (Input/output error): a miss" in caplog.text
    assert reader.stats().quarantined == 0
    assert lab.is_right(reader, 1)


def test_what_cannot_be_read_is_a_miss_and_leaves_no_descriptor(lab, filled, failing):
    before = lab.descriptors()
    with failing("read", ".kv"):
        assert lab.open(filled, 1) is None
    assert filled.stats().quarantined == 1
    assert lab.descriptors() <= before
    reader = lab.open(filled, 2)
    with failing("preadv", ".kv"), pytest.raises(CorruptKVError, match="cannot be read"):
        lab.read(reader)
    assert lab.open(filled, 2) is None
    lab.put(filled, 1)
    assert lab.is_right(filled, 1)


# -- large layers -----------------------------------------------------------------------------------


LAYOUT = KVLayout((LayerShape(4, 64), LayerShape(4, 64)), "float32")
TOKENS = 601
LAYER_BYTES = 2 * 4 * TOKENS * 64 * 4


@pytest.fixture
def put(lab, make_store):
    """A chunk whose layers take several portions, and no whole number of them."""
    assert LAYER_BYTES > 2 * PORTION_BYTES
    assert LAYER_BYTES % PORTION_BYTES
    store = make_store()
    return lab.put(store, 1, LAYOUT, TOKENS), store


@pytest.mark.parametrize("portion", range(3))
def test_a_large_layer_is_read_and_a_flipped_bit_in_any_portion_noticed(lab, put, portion):
    kv, store = put
    reader = lab.open(store, 1, LAYOUT, TOKENS)
    assert all(map(torch.equal, lab.read_into_prompt(reader, LAYOUT, TOKENS), kv.layers))
    lab.flip(lab.file(store, 1), portion * PORTION_BYTES - LAYER_BYTES)
    reader.read_layer(0, torch.empty(2, 4, TOKENS, 64))
    with pytest.raises(CorruptKVError, match="not those that were put"):
        reader.read_layer(1, torch.empty(2, 4, TOKENS, 64))
    assert lab.open(store, 1, LAYOUT, TOKENS) is None


@pytest.mark.parametrize(
    "sizes",
    [[], [1], [PORTION_BYTES], [PORTION_BYTES - 1, 1, 1], [1000] * 1200, [3 * PORTION_BYTES]],
)
def test_portions_keep_the_order_and_the_maximum_size(sizes):
    buffers = [bytearray(os.urandom(size)) for size in sizes]
    found = list(portions([memoryview(buffer) for buffer in buffers]))
    lengths = [sum(map(len, portion)) for portion in found]
    assert all(length == PORTION_BYTES for length in lengths[:-1])
    assert all(0 < length <= PORTION_BYTES for length in lengths)
    assert b"".join(b"".join(portion) for portion in found) == b"".join(buffers)


# -- the page cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_tiers", [False, True])
@pytest.mark.parametrize(
    ("code", "is_cached"), [(errno.EAGAIN, False), (errno.EOPNOTSUPP, True), (errno.EIO, True)]
)
def test_a_file_counts_as_cached_unless_the_kernel_would_wait(
    lab, store, monkeypatch, code, is_cached, in_tiers
):
    reader = lab.open(KVStore(MemoryStore(1 << 24), store) if in_tiers else store, 1)
    assert reader.is_cached()  # just written

    def answer(fd, buffers, offset, flags):
        assert flags == os.RWF_NOWAIT
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", answer)
        assert reader.is_cached() == is_cached
        patch.delattr(os, "RWF_NOWAIT")  # a system that cannot tell
        assert reader.is_cached()
    reader.close()
