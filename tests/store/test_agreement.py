"""Stores over one remote whose machines compute the same KV, or other KV."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from blendrag.errors import StoreFullError, StoreUnavailableError
from blendrag.store import agreement, open_store
from blendrag.store.agreement import ForeignKVError, Probe
from blendrag.store.objects import RemoteObjects
from blendrag.store.remote import Pause, RemoteTier, name_of

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
            return Probe(
                lab.key(PROBE),
                lab.layout,
                lab.tokens,
                lambda: kv,
                lambda found: lab.gives(found, kv),
            )

        return store.agrees(lab.namespace, probe, create)

    return reach


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
    assert not other.found(lab.namespace, [lab.key(1)])
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
    assert lab.is_right(one, PROBE)


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
    (bucket / name_of(lab.namespace, lab.key(PROBE))).unlink()
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
    path = bucket / name_of(lab.namespace, lab.key(PROBE))
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
