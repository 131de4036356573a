import errno
import fcntl
import logging
import os
import random
import struct

import pytest
import torch

from blendrag.errors import CorruptKVError
from blendrag.store.payload_files import QUARANTINE_FILES, Name

pytestmark = pytest.mark.early


def assert_miss_with_quarantine(lab, store, number):
    """Opening misses, or reading raises; either way the file is set aside and put heals."""
    reader = lab.open(store, number)
    if reader is not None:
        with pytest.raises(CorruptKVError):
            lab.read(reader)
    assert store.stats().quarantined == 1
    assert lab.open(store, number) is None
    assert not lab.has(store, number)
    assert lab.payloads(store.root) == []
    lab.put(store, number)
    assert lab.is_right(store, number)


def overwrite(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("position", [0, 7, 8, 100, 4000, 4096, 9000, -1])
def test_a_flipped_bit_is_a_miss(lab, make_store, position, caplog):
    store = make_store()
    lab.put(store, 1)
    path = lab.file(store, 1)
    data = path.read_bytes()
    overwrite(path, position % len(data), bytes([data[position] ^ 1]))
    with caplog.at_level(logging.WARNING, "blendrag.store"):
        assert_miss_with_quarantine(lab, store, 1)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("change", [-1, -5000, 1, 4096])
def test_a_truncated_or_extended_file_is_a_miss(lab, make_store, change):
    store = make_store()
    lab.put(store, 1)
    path = lab.file(store, 1)
    os.truncate(path, path.stat().st_size + change)
    assert_miss_with_quarantine(lab, store, 1)


def test_an_empty_file_is_a_miss(lab, make_store):
    store = make_store()
    lab.put(store, 1)
    os.truncate(lab.file(store, 1), 0)
    assert_miss_with_quarantine(lab, store, 1)


def test_a_file_truncated_while_open_raises_and_never_kills(lab, make_store):
    store = make_store()
    lab.put(store, 1)
    reader = lab.open(store, 1)
    os.truncate(lab.file(store, 1), 4096 + 100)
    with pytest.raises(CorruptKVError, match="shorter"):
        reader.read_layer(0, torch.zeros(2, 2, lab.tokens, 8))
    assert lab.open(store, 1) is None
    assert store.stats().quarantined == 1


def test_swapped_files_are_misses(lab, make_store):
    store = make_store()
    lab.put(store, 1)
    lab.put(store, 2)
    one, two = lab.file(store, 1), lab.file(store, 2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert lab.open(store, 1) is None
    assert lab.open(store, 2) is None
    assert store.stats().quarantined == 2


def test_swapped_layers_of_equal_shape_are_noticed(lab, make_store):
    store = make_store()
    lab.put(store, 1)
    path = lab.file(store, 1)
    data = path.read_bytes()
    size = lab.layout.layer_bytes(0, lab.tokens)
    sums = data.index(b'"checksums":"') + len(b'"checksums":"')
    digits = data[sums : sums + 32]
    overwrite(path, sums, digits[16:] + digits[:16])
    overwrite(path, 4096, data[4096 + size : 4096 + 2 * size] + data[4096 : 4096 + size])
    assert_miss_with_quarantine(lab, store, 1)


@pytest.mark.parametrize(
    "length", [0, 1, 4087, 4089, 1 << 20, (1 << 20) + 1, 1 << 31, 1 << 63, (1 << 64) - 1]
)
def test_a_hostile_header_length_is_a_miss(lab, make_store, length):
    store = make_store()
    lab.put(store, 1)
    overwrite(lab.file(store, 1), 0, struct.pack("<Q", length))
    assert_miss_with_quarantine(lab, store, 1)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":' * 400,
        b'{"l0000":0,"l0000":1}',
        b'{"__metadata__":{"blendrag_format":"2"}}',
        b"\xff" * 2000,
    ],
)
def test_a_hostile_header_is_a_miss(lab, make_store, header):
    store = make_store()
    lab.put(store, 1)
    overwrite(lab.file(store, 1), 8, header)
    assert_miss_with_quarantine(lab, store, 1)


def test_a_thousand_random_mutations_never_give_wrong_bytes(lab, make_store):
    chance = random.Random(4)
    store = make_store()
    right = lab.kv(1).layers
    wrong = served = 0
    lab.put(store, 1)
    good = lab.file(store, 1).read_bytes()
    logging.getLogger("blendrag.store").disabled = True
    try:
        for _ in range(1000):
            lab.put(store, 1)
            path = lab.file(store, 1)
            data = bytearray(good)
            for _ in range(chance.randint(1, 3)):
                action, at = chance.randrange(4), chance.randrange(len(data))
                if action == 0:
                    data[at] ^= 1 << chance.randrange(8)
                elif action == 1:
                    del data[at : at + chance.randint(1, 64)]
                elif action == 2:
                    data[at:at] = chance.randbytes(chance.randint(1, 64))
                else:
                    data[at : at + 32] = chance.randbytes(len(data[at : at + 32]))
            path.write_bytes(data)
            reader = lab.open(store, 1)
            if reader is None:
                continue
            try:
                read = lab.read(reader)
            except CorruptKVError:
                continue
            finally:
                reader.close()
            served += 1
            wrong += not all(map(torch.equal, read, right)) or bytes(data) != good
    finally:
        logging.getLogger("blendrag.store").disabled = False
    assert wrong == 0
    assert served <= 5


def test_a_symbolic_link_is_never_followed(lab, make_store, tmp_path):
    store = make_store()
    lab.put(store, 1)
    path = lab.file(store, 1)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert lab.open(store, 1) is None
    assert elsewhere.exists()
    lab.put(store, 1)
    assert lab.is_right(store, 1)


def test_a_linked_directory_is_never_followed(lab, make_store, tmp_path):
    store = make_store()
    lab.put(store, 1)
    directory = lab.file(store, 1).parent
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(tmp_path / "elsewhere")
    assert lab.open(store, 1) is None
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_a_fifo_is_a_miss_and_does_not_hang(lab, make_store):
    store = make_store()
    lab.put(store, 1)
    path = lab.file(store, 1)
    path.unlink()
    os.mkfifo(path)
    assert_miss_with_quarantine(lab, store, 1)


def test_a_vanished_file_is_a_miss_and_put_writes_it_again(lab, make_store):
    store = make_store()
    lab.put(store, 1)
    lab.file(store, 1).unlink()
    assert lab.open(store, 1) is None
    assert store.stats().entries == 0
    lab.put(store, 1)
    assert lab.is_right(store, 1)


def test_a_query_out_of_descriptors_misses_without_blaming_the_file(lab, make_store, monkeypatch):
    store = make_store()
    lab.put(store, 1)
    with monkeypatch.context() as patch:

        def fail(name):
            raise OSError(24, "Too many open files")

        patch.setattr(store._files, "open", fail)
        assert lab.open(store, 1) is None
    assert store.stats().quarantined == 0
    assert lab.is_right(store, 1)


def test_the_quarantine_keeps_only_the_newest_files(lab, make_store, root):
    store = make_store()
    for number in range(QUARANTINE_FILES + 4):
        lab.put(store, number)
        os.truncate(lab.file(store, number), 10)
        assert lab.open(store, number) is None
    assert len(list((root / "quarantine").glob("*.kv"))) == QUARANTINE_FILES


@pytest.mark.parametrize("index", ["free", "held"])
def test_a_damaged_file_that_cannot_be_set_aside_gives_way_to_the_chunk_put_again(
    lab, make_store, root, monkeypatch, index
):
    store = make_store()
    lab.put(store, 1)
    path = lab.file(store, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, open(root / "index" / "lock") as lock:
        patch.setattr(os, "rename", fail)
        if index == "held":
            fcntl.flock(lock, fcntl.LOCK_EX)  # nor can its row be dropped
        with pytest.raises(CorruptKVError):
            lab.read(lab.open(store, 1))
    assert path.exists()
    last = Name(lab.namespace, lab.key(1), "f" * 16)  # a rebuild meets the other one first
    monkeypatch.setattr("blendrag.store.disk.new_name", lambda namespace, key: last)
    lab.put(store, 1)
    assert [path.name for path in lab.payloads(root)] == [last.file]
    store.close()
    (root / "index" / "index.db").unlink()
    assert lab.is_right(make_store(), 1)
