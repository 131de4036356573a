"""Several processes on one store: spawned or forked, writing, reading and maintaining it at once."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blendrag.errors import InvalidInputError, StoreUnavailableError
from blendrag.store import maintenance
from blendrag.store.disk import DiskStore
from blendrag.store.index import IndexLocked
from blendrag.store.memory import MemoryStore
from blendrag.store.payload_files import PayloadFiles
from blendrag.store.tiered import KVStore, open_store

#: The beginning of a spawned process.
PROLOGUE = f"""
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from kv_lab import Lab
from blendrag.store.tiered import open_store
root = Path(sys.argv[1])
store = open_store(root, 1 << 20, None)
"""
INGEST = """
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    Lab.put(store, number)
    print(number, flush=True)
store.close()
"""


def spawn(code: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + code, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def succeeded(pid: int, within_s: float = 60.0) -> bool:
    """Whether a forked child ends well, and in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    return False


@pytest.mark.slow
def test_a_spawned_and_a_forked_ingest_and_a_reader_share_a_store(lab, root, fork):
    DiskStore(root, 1 << 30).close()
    right, kvs = set[int](), [lab.kv(number) for number in range(45)]
    spawned = spawn(INGEST, root, 0, 30)

    def ingest():
        while not lab.payloads(root):  # the other one has begun
            time.sleep(0.01)
        with contextlib.closing(open_store(root, 1 << 20, None)) as store:
            for number in range(15, 45):
                store.put(lab.namespace, lab.key(number), kvs[number])

    forked = fork(ingest)
    try:
        with contextlib.closing(open_store(root, 1 << 20, None)) as store:
            is_over = False
            while not is_over:
                time.sleep(0.02)  # the others are to write meanwhile
                ended = os.waitid(os.P_PID, forked, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                is_over = ended is not None and spawned.poll() is not None
                for number, reader in ((n, lab.open(store, n)) for n in range(45)):
                    if reader is not None:
                        assert lab.gives(reader, kvs[number])
                        right.add(number)
            assert store.stats().quarantined == 0
        stdout, stderr = spawned.communicate()
        assert spawned.returncode == 0, stderr
        assert set(map(int, stdout.split())) == set(range(30))
        assert right == set(range(45))
        assert succeeded(forked)
    finally:
        spawned.kill()
        spawned.communicate()
    assert len(lab.payloads(root)) == 45  # one copy of each
    report = maintenance.check(root)
    assert report.is_good
    (namespace,) = report.namespaces
    assert (namespace.good, namespace.missing_rows, namespace.dead_rows) == (45, 0, 0)
    assert list((root / "tmp").iterdir()) == []


@pytest.mark.parametrize("send", [pickle.dumps, copy.deepcopy, copy.copy])
def test_an_open_store_is_neither_pickled_nor_copied(make_store, send):
    disk, memory = make_store(), MemoryStore(1 << 20)
    for store in (disk, memory, KVStore(memory, disk)):
        with pytest.raises(InvalidInputError, match="send its path and open it there"):
            send(store)


def test_a_store_is_refused_in_a_forked_child_which_opens_its_own(lab, root, fork):
    """Even if a thread of the parent, which the child does not have, holds a lock at the fork."""
    store = KVStore(MemoryStore(1 << 20), DiskStore(root, 1 << 30))
    kvs = [lab.kv(number) for number in range(3)]
    lab.put(store, 0)
    assert lab.is_right(store, 0)
    store.drain()
    reader = lab.open(store.disk, 0)
    entry = lab.namespace, lab.key(0)

    def use_in_child():
        for use in (
            lambda: lab.open(store, 0),
            lambda: lab.open(store.disk, 0),
            lambda: store.put(*entry, kvs[0]),
            lambda: store.where(lab.namespace, [lab.key(0)]),
            lambda: store.delete(*entry),
            lambda: list(store.keys(lab.namespace)),
            lambda: store.pin(*entry),
            store.pin_scope,
            store.stats,
            store.drain,
            store.disk.recover,
        ):
            with pytest.raises(InvalidInputError, match="open the store again here"):
                use()
        store.close()
        with contextlib.closing(DiskStore(root, None)) as own:
            assert lab.is_right(own, 0, kvs[0])
            own.put(lab.namespace, lab.key(2), kvs[2])

    with store.disk._put_lock, store.disk._recent_lock, store.memory._lock, reader._lock:
        assert succeeded(fork(use_in_child), within_s=120)
    reader.close()
    lab.put(store, 1)
    assert lab.right(store) == [0, 1, 2]
    store.close()
    assert maintenance.check(root).is_good
    assert list((root / "tmp").iterdir()) == []


# -- readers -----------------------------------------------------------------------------------------


def test_readers_see_right_bytes_or_a_miss_while_the_store_changes(lab, root, make_store, fork):
    writer = make_store(limit_bytes=4 * lab.entry_bytes)
    kvs = [lab.kv(number) for number in range(8)]
    lab.put(writer, 0)
    stop = root.parent / "stop"

    def read():
        hits = 0
        with contextlib.closing(DiskStore(root, None, read_only=True)) as store:
            while not stop.exists() or not hits:
                for number, kv in enumerate(kvs):
                    reader = lab.open(store, number)
                    if reader is not None:
                        assert lab.gives(reader, kv)
                        hits += 1
            assert store.stats().quarantined == 0
            with contextlib.suppress(StoreUnavailableError):
                store.put(lab.namespace, lab.key(99), kvs[0])
                raise AssertionError

    children = [fork(read), fork(read)]
    for number in 5 * list(range(8)):
        writer.put(lab.namespace, lab.key(number), kvs[number])
    stop.touch()
    assert all(map(succeeded, children))
    assert writer.stats().entries == len(lab.payloads(root)) == 4
    assert sorted(os.listdir(root / "quarantine")) == []


# -- other processes put or remove the same -----------------------------------------------------------


@pytest.mark.slow
def test_maintenance_while_two_processes_write(lab, root, tmp_path, fork):
    kvs = [lab.kv(number) for number in range(12)]
    DiskStore(root, 8 * lab.entry_bytes).close()
    stop = root.parent / "stop"

    def write(numbers):
        with contextlib.closing(DiskStore(root, None)) as store:
            while not stop.exists():
                for number in numbers:
                    store.put(lab.namespace, lab.key(number), kvs[number])
                    lab.is_right(store, number, kvs[number])
            assert store.stats().quarantined == 0

    children = [fork(lambda: write(range(8))), fork(lambda: write(range(4, 12)))]
    for turn in range(8):
        assert maintenance.check(root, repair=bool(turn % 2)).is_good
        done = maintenance.collect(root, 3 * lab.entry_bytes)
        assert done.left_bytes <= 8 * lab.entry_bytes
        assert maintenance.export_archive(root, tmp_path / "kv.tar").left_out == []
        assert maintenance.import_archive(root, tmp_path / "kv.tar").rejected == []
        maintenance.survey(root)  # walks over files that the writers replace meanwhile
        with contextlib.closing(DiskStore(root, None)) as store:
            assert store.stats().size_bytes <= 8 * lab.entry_bytes
        if turn == 4:
            maintenance.clear(root)
    stop.touch()
    assert all(map(succeeded, children))
    report = maintenance.check(root)
    (namespace,) = report.namespaces
    assert report.is_good
    assert (namespace.missing_rows, namespace.dead_rows) == (0, 0)


@pytest.fixture
def synced(monkeypatch):
    """Inodes of what was synced so far."""
    inodes = set()
    monkeypatch.setattr(os, "fsync", lambda fd: inodes.add(os.fstat(fd).st_ino))
    return inodes


def way_to(payload, root):
    """Inodes of the directories that have to be durable for a payload to be there."""
    return {path.stat().st_ino for path in payload.parents if path.is_relative_to(root / "kv")}


@pytest.mark.parametrize("appears", ["before", "meanwhile"])
def test_an_existing_chunk_is_made_durable_before_put_returns(
    lab, make_store, root, monkeypatch, synced, appears
):
    store, other = make_store(), make_store()

    def put_by_other():
        lab.put(other, 1)
        synced.clear()  # as if the other one had only come to that

    if appears == "before":
        put_by_other()
    else:
        write = store._files.write
        monkeypatch.setattr(store._files, "write", lambda *args: (write(*args), put_by_other()))
    lab.put(store, 1)
    shard = {lab.file(store, 1).parent.stat().st_ino}  # above it, the put itself has synced
    assert (way_to(lab.file(store, 1), root) if appears == "before" else shard) <= synced
    assert lab.right(store) == [1]
    assert len(lab.payloads(root)) == 1


def test_a_chunk_found_by_listing_is_made_durable_before_contains_returns(
    lab, make_store, store, root, monkeypatch, synced, failing
):
    again = make_store()
    synced.clear()
    assert lab.has(again, 1)
    assert not synced  # the index knows only what is durable

    def is_locked(*args):
        raise IndexLocked("the index is held")

    monkeypatch.setattr(again._index, "get", is_locked)
    assert lab.has(again, 1)
    assert way_to(lab.file(again, 1), root) <= synced
    assert not lab.has(again, 2)
    with failing("fsync"):
        assert not lab.has(again, 1)


def test_a_chunk_removed_before_it_is_made_durable_is_put_again(
    lab, make_store, store, monkeypatch
):
    again = make_store()
    sync, path = again._files.sync, lab.file(store, 1)

    def too_late(shard):
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()
        sync(shard)

    monkeypatch.setattr(again._files, "sync", too_late)
    lab.put(again, 1)
    assert lab.is_right(again, 1)


@pytest.fixture
def cleared_meanwhile(root, monkeypatch):
    """``cleared_meanwhile(times)``: between writing and indexing, a payload is cleared away so often."""
    write = PayloadFiles.write

    def begin(times):
        left = [times]

        def cleared(files, *args):
            write(files, *args)
            if left[0]:
                left[0] -= 1
                maintenance.clear(root)

        monkeypatch.setattr(PayloadFiles, "write", cleared)

    return begin


@pytest.mark.parametrize("times", [1, 4, 100])
def test_a_chunk_cleared_before_it_is_indexed_is_put_again(
    lab, make_store, root, cleared_meanwhile, times
):
    store = make_store()
    cleared_meanwhile(times)
    if times == 100:
        with pytest.raises(StoreUnavailableError, match="expected no process to clear the store"):
            lab.put(store, 1)
    else:
        lab.put(store, 1)
    count = int(times < 100)
    assert lab.right(store) == [1] * count
    assert len(lab.payloads(root)) == store.stats().entries == store.stats().puts == count


def test_an_import_cleared_meanwhile_is_an_error(lab, root, tmp_path, cleared_meanwhile):
    archive = tmp_path / "kv.tar"
    maintenance.export_archive(lab.fill(tmp_path / "elsewhere", [1]), archive)
    cleared_meanwhile(1)
    with pytest.raises(StoreUnavailableError, match=r"removed from store .* repeat the command"):
        maintenance.import_archive(root, archive)
    assert maintenance.import_archive(root, archive).imported == 1
    assert maintenance.check(root).is_good
