"""The remote tier over a directory: right bytes or a miss, whatever the remote holds."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from concurrent.futures import Future

import pytest
import torch

from blendrag.errors import CorruptKVError, InvalidInputError, StoreUnavailableError
from blendrag.store.base import WantedKV
from blendrag.store.disk import DiskStore
from blendrag.store.remote import objects
from blendrag.store.remote.directory import ObjectDirectory
from blendrag.store.remote.objects import ObjectBytes
from blendrag.store.remote.root import name_of
from blendrag.store.remote.tier import ASKED_TOGETHER, MAX_WRONG, Pause, RemoteTier
from blendrag.store.tiered import open_store
from clocks import Clock

pytest.importorskip("obstore")

SECRET = "a secret of all machines"


@pytest.fixture(params=[None, SECRET], ids=["unsealed", "sealed"])
def secret(request):
    return request.param


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def make_remote(bucket):
    with contextlib.ExitStack() as opened:

        def make(secret=None, timeout_s=60.0):
            tier = RemoteTier(f"file://{bucket}", secret, timeout_s)
            return opened.enter_context(contextlib.closing(tier))

        yield make


def upload(lab, tier, root, *numbers):
    """Put these chunks into the remote, from a store of their own."""
    with contextlib.closing(DiskStore(root / "local", 1 << 30)) as disk:
        for number in numbers:
            lab.put(disk, number)
            with disk.payload(lab.namespace, lab.key(number)) as payload:
                tier.put(*payload)


def object_of(lab, bucket, number):
    return bucket / name_of(lab.namespace, lab.key(number))


# -- the tier ----------------------------------------------------------------------------------------


def test_a_chunk_comes_back_bit_exact(lab, make_remote, tmp_path, secret):
    tier = make_remote(secret)
    assert lab.open(tier, 1) is None
    upload(lab, tier, tmp_path, 1, 2)
    other = make_remote(secret)
    assert lab.right(other) == [1, 2]
    assert set(other.keys(lab.namespace)) == {lab.key(1), lab.key(2)}
    assert lab.has(other, 1)
    assert not lab.has(other, 3)
    assert lab.open(other, 1, tokens=lab.tokens + 1) is None


def test_damage_anywhere_is_a_miss(lab, make_remote, bucket, tmp_path, secret):
    upload(lab, make_remote(secret), tmp_path, 1)
    path = object_of(lab, bucket, 1)
    good = path.read_bytes()
    damaged = [bytes([*good[:at], good[at] ^ 4, *good[at + 1 :]]) for at in (9, 4200, 6000)]
    damaged += [good[:-1], good[:100], b"", good + b"\0"]
    for data in damaged:
        path.write_bytes(data)
        tier = make_remote(secret)
        reader = lab.open(tier, 1)
        if reader is not None:
            with pytest.raises(CorruptKVError, match="not those that were put"):
                lab.read(reader)
            reader.close()
        assert lab.open(tier, 1) is None  # in doubt from now on
        assert not lab.has(tier, 1)


def test_a_damaged_object_is_replaced_by_the_next_put(lab, make_remote, bucket, tmp_path):
    tier = make_remote()
    upload(lab, tier, tmp_path, 1)
    lab.flip(object_of(lab, bucket, 1))
    with pytest.raises(CorruptKVError):
        lab.read(lab.open(tier, 1))
    upload(lab, tier, tmp_path, 1)
    assert lab.is_right(tier, 1)


def test_bytes_damaged_on_the_way_are_asked_for_again(lab, make_remote, tmp_path, monkeypatch):
    tier = make_remote()
    upload(lab, tier, tmp_path, 1)
    reader = lab.open(tier, 1)
    real, turns = tier.finish_read, iter(range(100))

    def damaged_once(begun, waiting):
        piece = real(begun, waiting)
        return piece if next(turns) else piece._replace(data=memoryview(bytes(len(piece.data))))

    monkeypatch.setattr(tier, "finish_read", damaged_once)
    assert lab.gives(reader, lab.kv(1))


def test_what_cannot_be_made_durable_is_not_acknowledged(
    lab, make_remote, bucket, tmp_path, monkeypatch
):
    def failing(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with contextlib.closing(DiskStore(tmp_path / "local", 1 << 30)) as disk:
        lab.put(disk, 1)
        with disk.payload(lab.namespace, lab.key(1)) as payload:
            with monkeypatch.context() as patched:
                patched.setattr(os, "fsync", failing)
                with pytest.raises(StoreUnavailableError, match="Input/output error"):
                    make_remote().put(*payload)
            assert not list(bucket.rglob("*.kv*"))


def test_an_object_of_another_machine_survives_a_sync_that_fails(bucket, monkeypatch):
    def failing(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with contextlib.closing(objects.RemoteObjects(f"file://{bucket}", 5.0)) as there:
        assert there.put("name", b"bytes", if_absent=True)
        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(StoreUnavailableError, match="Input/output error"):
            there.put("name", b"bytes", if_absent=True)
    assert (bucket / "name").read_bytes() == b"bytes"


def test_kv_of_a_writer_without_the_key_is_not_used(lab, make_remote, bucket, tmp_path):
    """Right checksums, right form, and even right seals of another chunk or key."""
    upload(lab, make_remote(SECRET), tmp_path, 1, 2)
    (tmp_path / "forged").mkdir()
    forger = RemoteTier(f"file://{tmp_path / 'forged'}", "a key that was guessed", 5.0)
    lab_key = lab.key(1)
    with contextlib.closing(DiskStore(tmp_path / "evil", 1 << 30)) as disk:
        disk.put(lab.namespace, lab_key, lab.kv(7))
        with contextlib.closing(forger), disk.payload(lab.namespace, lab_key) as payload:
            forger.put(*payload)
    forged = (tmp_path / "forged" / name_of(lab.namespace, lab_key)).read_bytes()
    real = object_of(lab, bucket, 1).read_bytes()
    seals = 3 * 32
    for data in (forged, real[:seals] + forged[seals:], forged[seals:]):
        object_of(lab, bucket, 1).write_bytes(data)
        tier = make_remote(SECRET)
        reader = lab.open(tier, 1)
        if reader is not None:
            with pytest.raises(CorruptKVError):
                lab.read(reader)
        assert lab.is_right(tier, 2)


def test_a_remote_that_only_lies_is_left_alone(lab, make_remote, bucket, tmp_path):
    numbers = range(MAX_WRONG + 1)
    upload(lab, make_remote(), tmp_path, *numbers)
    for number in numbers[:-1]:
        object_of(lab, bucket, number).write_bytes(b"")
    tier = make_remote()
    assert lab.right(tier, numbers) == []
    assert "wrong bytes for 3 chunks in a row" in tier.trouble


def test_machines_that_put_the_same_chunk_leave_one_object(lab, make_remote, bucket, tmp_path):
    tiers, failures = [make_remote() for _ in range(4)], []

    def put(tier, root):
        try:
            upload(lab, tier, root, 1, 2)
        except Exception as exc:
            failures.append(exc)

    threads = [
        threading.Thread(target=put, args=(tier, tmp_path / str(i))) for i, tier in enumerate(tiers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len([path for path in bucket.rglob("*") if path.is_file()]) == 3
    assert lab.right(make_remote()) == [1, 2]


def test_a_frozen_remote_costs_a_bounded_wait_once(lab, make_remote, tmp_path, monkeypatch):
    upload(lab, make_remote(), tmp_path, 1, 2)
    tier, asked, thawed = make_remote(), [], threading.Event()
    tier.timeout_s = 0.2
    with monkeypatch.context() as patch:
        patch.setattr(ObjectDirectory, "check", lambda *of: asked.append(of) or thawed.wait())
        assert lab.open(tier, 1) is None
        assert "gave no answer in time" in tier.trouble
        assert lab.open(tier, 2) is None
        assert len([path for _, path in asked if path.startswith("kv/")]) == 1
        thawed.set()


# -- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "secret", "said"),
    [
        ("ftp://x", None, "expected s3://bucket/prefix"),
        ("nonsense", None, "is no object store"),
        ("file://relative", None, "expected s3://bucket/prefix, .* file:///directory"),
        ("s3:/bucket", None, "is no object store"),
        ("file:///no/such/directory", None, "there is no directory"),
        ("file:///", "short", "expected at least 16"),
    ],
)
def test_what_is_no_remote_is_refused(url, secret, said):
    with pytest.raises(InvalidInputError, match=said):
        RemoteTier(url, secret, 1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("blendrag-remote 2 unsealed\n", "has layout version 2, expected 1"),
        ("something else", "that blendrag did not write"),
        ("blendrag-remote 1 0123\n", "holds KV sealed with a key"),
    ],
)
def test_a_remote_of_another_kind_is_refused(make_remote, bucket, text, said):
    (bucket / "format").write_text(text)
    with pytest.raises(InvalidInputError, match=said):
        make_remote()


def test_a_missing_obstore_is_said_in_one_sentence(bucket, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'blendrag\[remote\]'"):
        RemoteTier(f"file://{bucket}", None, 1.0)


def test_the_headers_of_a_prompt_are_requested_at_once(lab, make_remote, tmp_path, monkeypatch):
    tier, begun = make_remote(), []
    upload(lab, tier, tmp_path, 1, 2, 3)
    real = tier.objects.read
    monkeypatch.setattr(tier.objects, "read", lambda *args: begun.append(args) or real(*args))
    wait = tier.objects.wait

    def waiting(result, timeout_s):
        assert len(begun) == 3
        return wait(result, timeout_s)

    monkeypatch.setattr(tier.objects, "wait", waiting)
    wanted = [WantedKV(lab.namespace, lab.key(number), lab.tokens) for number in (1, 2, 3)]
    readers = tier.open_all(wanted, lab.layout)
    assert len(begun) == 3
    assert all(lab.gives(reader, lab.kv(n)) for n, reader in enumerate(readers, 1))


def test_whether_chunks_are_there_is_asked_for_all_at_once(lab, make_remote, monkeypatch, tmp_path):
    tier, asked = make_remote(), []
    upload(lab, tier, tmp_path, 1, 2)
    begin, real = tier.objects.read, tier.objects.wait
    monkeypatch.setattr(tier.objects, "read", lambda *args: asked.append(args) or begin(*args))

    def wait(result, timeout_s):
        assert len(asked) == 3
        return real(result, timeout_s)

    monkeypatch.setattr(tier.objects, "wait", wait)
    keys = [lab.key(number) for number in (1, 2, 3)]
    assert tier.found(lab.namespace, keys) == set(keys[:2])


def test_the_time_limit_is_that_of_each_request_however_many_chunks_are_looked_for(
    lab, make_remote, monkeypatch
):
    tier, clock, under_way = make_remote(timeout_s=1.0), Clock(), set()
    monkeypatch.setattr("blendrag.store.remote.tier.time.monotonic", clock)

    def read(*args):
        under_way.add(request := Future())
        assert len(under_way) <= ASKED_TOGETHER
        return request

    def wait(request, timeout_s):
        under_way.remove(request)
        clock.now += 0.9 / ASKED_TOGETHER
        assert timeout_s > 0
        return ObjectBytes(memoryview(b"x"), 100)

    monkeypatch.setattr(tier.objects, "read", read)
    monkeypatch.setattr(tier.objects, "wait", wait)
    keys = [f"{number:064x}" for number in range(1500)]
    assert len(tier.found(lab.namespace, keys)) == 1500
    assert clock.now > 105  # by its start at 100 s


# -- below memory and disk ---------------------------------------------------------------------------


@pytest.fixture
def machine(lab, bucket, tmp_path):
    """Opens the store of a machine, all over one remote."""
    with contextlib.ExitStack() as opened:

        def make(name, ram_bytes=0, disk_bytes=1 << 30, timeout_s=60.0, read_only=False):
            def remote():
                return RemoteTier(f"file://{bucket}", SECRET, timeout_s)

            store = open_store(tmp_path / name, ram_bytes, disk_bytes, read_only, remote=remote)
            return opened.enter_context(contextlib.closing(lab.agree(store)))

        yield make


def source_of(lab, store, number):
    with contextlib.closing(lab.open(store, number)) as reader:
        return reader.tier


def test_what_one_machine_puts_another_reads_and_keeps(lab, machine, bucket):
    one, other = machine("one"), machine("other")
    lab.put(one, 1)
    one.flush()
    assert source_of(lab, other, 1) == "remote"  # no layer was read, so nothing is kept
    assert lab.is_right(other, 1)
    other.drain()
    assert source_of(lab, other, 1) == "disk"
    object_of(lab, bucket, 1).unlink()
    assert lab.is_right(other.disk, 1)
    stats = other.stats()
    assert (stats.hits, stats.misses, stats.remote_failures) == (4, 0, 0)
    assert one.stats().uploads == 1


def test_layers_that_were_not_read_are_verified_before_a_chunk_is_kept(lab, machine, bucket):
    one, other = machine("one"), machine("other")
    for number in (1, 2):
        lab.put(one, number)
    one.flush()
    lab.flip(object_of(lab, bucket, 2), -1)  # in the last layer
    for number in (1, 2):
        with contextlib.closing(lab.open(other, number)) as reader:
            reader.read_layer(0, torch.zeros(lab.layout.layer_shape(0, lab.tokens)))
    other.drain()
    assert lab.right(other.disk) == [1]
    lab.put(other, 2)
    other.flush()
    assert lab.is_right(machine("third"), 2)  # replaced, as it was never seen to be right


def test_an_object_damaged_after_it_was_put_is_put_again(lab, machine, bucket):
    one = machine("one")
    lab.put(one, 1)
    one.flush()
    lab.flip(object_of(lab, bucket, 1))
    one.delete(lab.namespace, lab.key(1))
    with pytest.raises(CorruptKVError):
        lab.is_right(one, 1)
    lab.put(one, 1)
    one.flush()
    assert lab.is_right(machine("other"), 1)


def test_the_local_disk_has_a_limit_of_its_own(lab, machine):
    one = machine("one", disk_bytes=2 * lab.entry_bytes)
    with one.pin_scope():
        for number in range(6):
            lab.put(one, number)
    one.flush()
    other = machine("other", disk_bytes=2 * lab.entry_bytes)
    assert lab.right(other, range(6)) == list(range(6))
    other.drain()
    assert lab.right(one, range(6)) == list(range(6))
    for store in (one, other):
        assert store.disk.stats().size_bytes <= 2 * lab.entry_bytes


def test_a_read_only_store_reads_the_remote_and_writes_nothing(lab, machine, tmp_path):
    one = machine("one")
    lab.put(one, 1)
    one.flush()
    machine("other").close()
    other = machine("other", ram_bytes=1 << 20, read_only=True)
    assert lab.is_right(other, 1)
    other.drain()
    assert lab.payloads(tmp_path / "other") == []
    assert source_of(lab, other, 1) == "memory"


def test_put_is_not_acknowledged_by_a_remote_that_fails(lab, machine, bucket):
    one = machine("one")
    moved = bucket.rename(bucket.with_name("unmounted"))
    bucket.write_text("no directory")
    lab.put(one, 1)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match="1 chunks were not copied to remote"):
            one.flush()
    assert lab.is_right(one, 1)
    bucket.unlink()
    moved.rename(bucket)
    one.remote._write_pause = Pause()
    one.flush()  # tries again what failed
    assert lab.is_right(machine("other"), 1)


def test_what_only_this_machine_has_is_copied_when_it_is_asked_for(lab, machine, tmp_path):
    lab.fill(tmp_path / "one", [1])
    one = machine("one")
    assert lab.has(one, 1)
    one.flush()
    other = machine("other")
    assert lab.has(other, 1)
    keys = [lab.key(1), lab.key(2)]
    assert other.where(lab.namespace, keys) == {lab.key(1): "remote"}
    assert one.where(lab.namespace, keys) == {lab.key(1): "disk"}
    assert not other.where(lab.namespace, keys, ask_remote=False)
    assert not one.delete(lab.namespace, lab.key(2))
    assert one.delete(lab.namespace, lab.key(1))
    assert lab.is_right(one, 1)  # other machines may use it
