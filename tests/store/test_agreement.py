"""Stores over one remote whose machines compute the same KV, or other KV."""

from __future__ import annotations

import contextlib
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from blendrag.errors import StoreFullError, StoreUnavailableError
from blendrag.store.base import ForeignKVError, Probe
from blendrag.store.identity import probe_key
from blendrag.store.remote import agreement
from blendrag.store.remote.objects import RemoteObjects
from blendrag.store.remote.root import name_of
from blendrag.store.remote.tier import Pause, RemoteTier
from blendrag.store.tiered import open_store

pytest.importorskip("obstore")

PROBE, OTHER_KERNELS = 100, 101


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def machine(bucket, tmp_path):
    with contextlib.ExitStack() as opened:

        def make(name, has_remote=True, read_only=False):
            def remote():
                return RemoteTier(f"file://{bucket}", None, 5.0)

            given = remote if has_remote else None
            store = open_store(tmp_path / name, 0, 1 << 30, read_only, remote=given)
            return opened.enter_context(contextlib.closing(store))

        yield make


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(agreement, "AGAIN_S", 0.0)


@pytest.fixture
def agree(lab):
    def reach(store, computes=PROBE, create=False):
        def probe():
            kv = lab.kv(computes)
            return Probe(lab.layout, lab.tokens, lambda: kv, lambda found: lab.gives(found, kv))

        return store.agrees(lab.namespace, probe, create)

    return reach


def wait_until(is_over):
    until = time.monotonic() + 120
    while not is_over():
        assert time.monotonic() < until
        yield time.sleep(0.01)


def failed():
    request = Future()
    request.set_exception(OSError("unplugged"))
    return request


def fill(lab, store, agree, computes=PROBE):
    assert agree(store, computes, create=True)
    lab.put(store, 1)
    store.flush()


def test_kv_of_a_remote_is_used_once_its_probe_was_compared(lab, machine, agree):
    fill(lab, machine("one"), agree)
    other = machine("other")
    assert lab.open(other, 1) is None
    assert not lab.has(other, 1)
    assert not other.where(lab.namespace, [lab.key(1)])
    assert agree(other)
    assert lab.has(other, 1)
    assert lab.is_right(other, 1)


def test_kv_of_other_kernels_is_neither_read_nor_joined(lab, machine, agree, bucket):
    fill(lab, machine("one"), agree)
    before = sorted(bucket.rglob("*.kv"))
    other = machine("other")
    for create in (False, True):
        with pytest.raises(ForeignKVError, match="does not compute on this machine"):
            agree(other, OTHER_KERNELS, create)
    assert lab.open(other, 1) is None
    lab.put(other, 2)
    with pytest.raises(StoreUnavailableError, match="1 chunks were not copied"):
        other.flush()
    assert sorted(bucket.rglob("*.kv")) == before


def test_a_store_filled_before_it_got_a_remote_is_compared_too(lab, machine, agree, bucket):
    fill(lab, machine("one"), agree)
    before = machine("other", has_remote=False)
    lab.put(before, 2)
    lab.put(before, OTHER_KERNELS)
    before.pin(lab.namespace, lab.key(OTHER_KERNELS))
    before.close()
    other = machine("other")
    assert lab.has(other, 2)
    with pytest.raises(StoreUnavailableError, match="could not be compared yet"):
        other.flush()
    with pytest.raises(ForeignKVError):
        agree(other, OTHER_KERNELS)
    assert len(list(bucket.rglob("*.kv"))) == 2


def test_of_two_machines_that_begin_an_empty_remote_one_is_refused(
    lab, machine, agree, bucket, monkeypatch
):
    one, other = machine("one"), machine("other")
    real = other.remote.put

    def put(header, read):  # the other machine is faster
        fill(lab, one, agree)
        real(header, read)

    monkeypatch.setattr(other.remote, "put", put)
    with pytest.raises(ForeignKVError):
        agree(other, OTHER_KERNELS, create=True)
    assert lab.is_right(one, 1)


def test_what_was_compared_is_known_without_a_model(lab, machine, agree):
    fill(lab, machine("one"), agree)
    for _ in range(2):
        agree(machine("other"))
        machine("other").close()
    other = machine("other")
    assert other.agrees(lab.namespace)
    assert lab.is_right(other, 1)
    assert not machine("third").agrees(lab.namespace)


def test_a_read_only_store_compares_and_keeps_nothing(lab, machine, agree, tmp_path):
    fill(lab, machine("one"), agree)
    machine("other").close()
    other = machine("other", read_only=True)
    assert agree(other)
    assert lab.is_right(other, 1)
    assert lab.payloads(tmp_path / "other") == []


def test_kv_without_a_probe_is_not_joined(lab, machine, agree, bucket):
    fill(lab, machine("one"), agree)
    (bucket / name_of(lab.namespace, probe_key(lab.namespace))).unlink()
    other = machine("other")
    assert not agree(other)
    with pytest.raises(ForeignKVError, match="without the probe by which it is compared"):
        agree(other, create=True)


@pytest.fixture
def unmounted(bucket):
    """A context in which the remote fails."""

    @contextlib.contextmanager
    def away():
        moved = bucket.rename(bucket.with_name("unmounted"))
        bucket.write_text("no directory")
        yield
        bucket.unlink()
        moved.rename(bucket)

    return away


def test_a_remote_that_returns_is_compared_then(lab, machine, agree, unmounted):
    fill(lab, machine("one"), agree)
    other = machine("other")
    with unmounted():
        assert not agree(other)
        assert "fails" in other.trouble
    assert not agree(other)
    other.remote._pause = Pause()
    assert agree(other)
    assert lab.is_right(other, 1)


def test_a_remote_that_was_down_is_checked_when_it_returns(
    lab, machine, agree, bucket, monkeypatch
):
    fill(lab, machine("one"), agree)
    with monkeypatch.context() as down:
        down.setattr(RemoteObjects, "read", lambda *args: failed())
        other = machine("other")
    assert "unplugged" in other.trouble
    (bucket / "format").write_text("blendrag-remote 9 unsealed")
    other.remote._pause = Pause()
    with pytest.raises(ForeignKVError, match="has layout version 9"):
        agree(other)


def test_a_damaged_probe_is_read_again_later(lab, machine, agree, bucket):
    fill(lab, machine("one"), agree)
    path = bucket / name_of(lab.namespace, probe_key(lab.namespace))
    good = path.read_bytes()
    lab.flip(path)
    other = machine("other")
    assert not agree(other)
    path.write_bytes(good)
    assert agree(other)


def test_each_thread_is_told_what_became_of_its_own_chunks(lab, machine, agree, bucket, unmounted):
    one = machine("one")
    fill(lab, one, agree)
    with unmounted(), ThreadPoolExecutor(1) as thread:
        lab.put(one, 2)
        thread.submit(one.flush).result()
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match="1 chunks were not copied"):
                one.flush()
    one.remote._write_pause = Pause()
    one.flush()
    assert lab.is_right(one.remote, 2)


def test_a_full_disk_does_not_keep_the_remote_from_being_used(lab, machine, agree, monkeypatch):
    fill(lab, machine("one"), agree)
    other = machine("other")

    def full(*args):
        raise StoreFullError("no room")

    monkeypatch.setattr(other.disk, "put_stored", full)
    assert agree(other)
    assert lab.is_right(other, 1)


def test_a_copy_of_the_probe_counts_only_until_the_model_is_loaded(lab, machine, agree):
    fill(lab, machine("one"), agree)
    agree(machine("other"))
    other = machine("other")
    assert other.agrees(lab.namespace)
    with pytest.raises(ForeignKVError, match="does not compute on this machine"):
        agree(other, OTHER_KERNELS)  # its libraries were upgraded meanwhile
    assert lab.open(other, 1) is None


def test_a_damaged_probe_is_replaced_by_a_machine_that_has_compared_it(lab, machine, agree, bucket):
    one, path = machine("one"), bucket / name_of(lab.namespace, probe_key(lab.namespace))
    fill(lab, one, agree)
    good = path.read_bytes()
    lab.flip(path)
    with pytest.raises(ForeignKVError, match=r"is damaged, .* store clear --remote"):
        agree(machine("newcomer"), create=True)
    other_kernels = machine("one")
    with pytest.raises(ForeignKVError, match="is damaged"):
        agree(other_kernels, OTHER_KERNELS, create=True)
    assert agree(machine("one"), create=True)
    assert path.read_bytes() == good


def test_an_empty_remote_gets_what_this_machine_computes_now(lab, machine, agree, bucket):
    fill(lab, machine("one"), agree, OTHER_KERNELS)
    shutil.rmtree(bucket / "kv")
    one = machine("one")  # with the probe of before
    assert agree(one, create=True)
    assert agree(machine("other"))


def test_what_failed_is_copied_once_the_remote_takes_chunks_again(
    lab, machine, agree, bucket, unmounted
):
    one = machine("one")
    fill(lab, one, agree)
    with unmounted():
        for number in range(2, 8):
            lab.put(one, number)
        with pytest.raises(StoreUnavailableError, match="6 chunks were not copied"):
            one.flush()
    one.remote._write_pause = Pause()
    with ThreadPoolExecutor(1) as thread:  # which owes nothing of what failed
        thread.submit(lab.put, one, 8).result()
    for _ in wait_until(lambda: all(lab.has(one.remote, number) for number in range(2, 9))):
        pass
    assert all(lab.is_right(one.remote, number) for number in range(2, 9))


def test_a_chunk_that_is_evicted_before_it_was_copied_counts_once(lab, machine, agree, unmounted):
    one = machine("one")
    fill(lab, one, agree)
    with unmounted():
        lab.put(one, 2)
        with pytest.raises(StoreUnavailableError, match="1 chunks were not copied"):
            one.flush()
        one.disk.delete(lab.namespace, lab.key(2))
        with pytest.raises(
            StoreUnavailableError, match=r"1 chunks were not copied .*\(they were evicted"
        ):
            one.flush()


def test_an_error_without_a_message_is_named_by_its_type(lab, machine, agree, monkeypatch):
    one = machine("one")
    fill(lab, one, agree)

    def fails(*args):
        raise MemoryError

    monkeypatch.setattr(one.remote, "put", fails)
    lab.put(one, 2)
    with pytest.raises(StoreUnavailableError, match=r"\(MemoryError\)"):
        one.flush()


def test_draining_ends_while_more_is_promoted(lab, tmp_path):
    with contextlib.closing(open_store(tmp_path, 1 << 30, 1 << 30)) as store:
        lab.put(store, 1)
        promoted, real = [], store._promotion._promote

        def promote(namespace, reader):
            real(namespace, reader)
            promoted.append(reader)
            if len(promoted) < 500:  # as queries do
                store.memory.delete(namespace, reader.key)
                ask()

        def ask():
            with contextlib.closing(lab.open(store, 1)) as reader:
                lab.read(reader)

        store._promotion._promote = promote
        ask()
        store.drain()
        assert len(promoted) < 500
