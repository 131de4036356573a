"""Several processes on one store: spawned or forked, writing, reading, looking after it, all at once."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from blendrag.errors import InvalidInputError, StoreUnavailableError
from blendrag.store import DiskStore, MemoryStore, TieredStore, maintenance

#: What a spawned process runs: nothing of its parent is there.
PROLOGUE = f"""
import json, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from kv_lab import Lab
from blendrag.store import open_store
root = Path(sys.argv[1])
store = open_store(root, 1 << 20, None)
"""
INGEST = """
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    Lab.put(store, number)
    print(number, flush=True)
store.close()
"""
SERVER = """
stop, right, wrong, rounds = root.parent / "stop", set(), 0, 0
while not stop.exists() or rounds < 2:
    rounds += 1
    for number in range(int(sys.argv[2])):
        reader = Lab.open(store, number)
        if reader is None:
            continue
        read = Lab.read(reader)
        reader.close()
        if all(map(torch.equal, read, Lab.kv(number).layers)):
            right.add(number)
        else:
            wrong += 1
stats = store.stats()
store.close()
print(json.dumps({"right": sorted(right), "wrong": wrong, "quarantined": stats.quarantined}))
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
    """Whether a forked child ends well, and in time; one that hangs is killed."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return False


def test_two_spawned_ingests_and_a_server_share_a_store(lab, root):
    DiskStore(root, 1 << 30).close()
    ingests = [spawn(INGEST, root, 0, 30), spawn(INGEST, root, 15, 45)]
    server = spawn(SERVER, root, 45)
    try:
        acknowledged = set()
        for ingest in ingests:
            stdout, stderr = ingest.communicate(timeout=200)
            assert ingest.returncode == 0, stderr
            acknowledged |= set(map(int, stdout.split()))
        assert acknowledged == set(range(45))
        (root.parent / "stop").touch()
        stdout, stderr = server.communicate(timeout=200)
        assert server.returncode == 0, stderr
        assert json.loads(stdout) == {"right": list(range(45)), "wrong": 0, "quarantined": 0}
    finally:
        for process in (*ingests, server):
            process.kill()
            process.communicate()
    assert len(lab.payloads(root)) == 45  # one copy of each
    report = maintenance.check(root)
    assert report.is_good
    (namespace,) = report.namespaces
    assert (namespace.good, namespace.missing_rows, namespace.dead_rows) == (45, 0, 0)
    assert list((root / "tmp").iterdir()) == []


NEIGHBOUR = """
assert Lab.is_right(store, 0)
Lab.put(store, int(sys.argv[2]))
store.close()
"""


def test_a_process_spawned_beside_an_open_store_opens_its_own(lab, root):
    store = TieredStore(MemoryStore(1 << 20), DiskStore(root, 1 << 30))
    lab.put(store, 0)
    assert lab.is_right(store, 0)
    processes = [spawn(NEIGHBOUR, root, n) for n in (1, 2)]
    for process in processes:
        _, stderr = process.communicate(timeout=200)
        assert process.returncode == 0, stderr
    assert all(lab.is_right(store, number) for number in range(3))
    store.close()
    assert maintenance.check(root).is_good


@pytest.mark.parametrize("kind", ["disk", "memory", "tiers"])
@pytest.mark.parametrize("send", [pickle.dumps, copy.deepcopy, copy.copy])
def test_an_open_store_is_not_sent_to_another_process_but_its_path_is(root, kind, send):
    disk, memory = DiskStore(root, 1 << 30), MemoryStore(1 << 20)
    store = {"disk": disk, "memory": memory, "tiers": TieredStore(memory, disk)}[kind]
    with pytest.raises(InvalidInputError, match="send its path and open it there"):
        send(store)
    store.close()
    disk.close()


# -- fork ---------------------------------------------------------------------------------------


def bytes_are_right(lab, store, number, kv):
    """:meth:`Lab.is_right` without torch operators, which a forked child must not run."""
    reader = lab.open(store, number)
    return reader is not None and gives(reader, kv)


def gives(reader, kv):
    """Whether a reader gives exactly these bytes; closes it."""
    for layer, expected in enumerate(kv.layers):
        out = torch.from_numpy(expected.numpy() * 0)
        reader.read_layer(layer, out)
        if out.numpy().tobytes() != expected.numpy().tobytes():
            return False
    reader.close()
    return True


def test_a_store_is_refused_in_a_forked_child_which_opens_its_own(lab, root, fork):
    """Even if a thread of the parent, which the child does not have, holds a lock at the fork."""
    store = TieredStore(MemoryStore(1 << 20), DiskStore(root, 1 << 30))
    kvs = [lab.kv(number) for number in range(3)]
    lab.put(store, 0)
    assert lab.is_right(store, 0)
    store.drain()
    reader = lab.open(store.disk, 0)

    def use_in_child():
        for use in (
            lambda: lab.open(store, 0),
            lambda: lab.open(store.disk, 0),
            lambda: store.put(lab.namespace, lab.key(1), kvs[1]),
            lambda: store.contains(lab.namespace, lab.key(0)),
            lambda: store.delete(lab.namespace, lab.key(0)),
            lambda: list(store.keys(lab.namespace)),
            lambda: store.pin(lab.namespace, lab.key(0)),
            store.pin_scope,
            store.stats,
            store.drain,
            store.disk.recover,
        ):
            with pytest.raises(InvalidInputError, match="open the store again here"):
                use()
        store.close()
        own = DiskStore(root, None)
        assert bytes_are_right(lab, own, 0, kvs[0])
        own.put(lab.namespace, lab.key(2), kvs[2])
        own.close()

    with store.disk._put_lock, store.disk._recent_lock, store.memory._lock, reader._lock:
        assert succeeded(fork(use_in_child), within_s=20)
    reader.close()
    lab.put(store, 1)
    assert all(lab.is_right(store, number) for number in range(3))
    store.close()
    assert maintenance.check(root).is_good
    assert list((root / "tmp").iterdir()) == []


# -- a shared store that is only read -------------------------------------------------------------


def test_readers_of_a_shared_store_see_right_bytes_or_a_miss_while_it_changes(
    lab, root, make_store, fork
):
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
                        assert gives(reader, kv)
                        hits += 1
            assert store.stats().quarantined == 0
            with contextlib.suppress(StoreUnavailableError):
                store.put(lab.namespace, lab.key(99), kvs[0])
                raise AssertionError

    children = [fork(read), fork(read)]
    for _ in range(5):
        for number in range(8):
            writer.put(lab.namespace, lab.key(number), kvs[number])
    stop.touch()
    assert all(map(succeeded, children))
    assert writer.stats().entries == len(lab.payloads(root)) == 4
    assert sorted(os.listdir(root / "quarantine")) == []


def test_a_reader_of_a_shared_store_creates_no_file_in_it(lab, root, make_store, fork):
    lab.put(make_store(), 1)
    make_store().close()
    kv = lab.kv(1)

    def files():
        return {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}

    before = files()

    def read():
        store = TieredStore(MemoryStore(1 << 20), DiskStore(root, None, read_only=True))
        for _ in range(3):
            assert bytes_are_right(lab, store, 1, kv)
            store.drain()
        store.close()
        maintenance.survey(root)

    assert succeeded(fork(read))
    assert files() == before


# -- maintenance beside writers -------------------------------------------------------------------


def test_a_store_is_looked_after_while_two_processes_write(lab, root, tmp_path, fork):
    kvs = [lab.kv(number) for number in range(12)]
    DiskStore(root, 8 * lab.entry_bytes).close()
    stop = root.parent / "stop"

    def write(numbers):
        with contextlib.closing(DiskStore(root, None)) as store:
            while not stop.exists():
                for number in numbers:
                    store.put(lab.namespace, lab.key(number), kvs[number])
                    bytes_are_right(lab, store, number, kvs[number])
            assert store.stats().quarantined == 0

    children = [fork(lambda: write(range(8))), fork(lambda: write(range(4, 12)))]
    for turn in range(8):
        assert maintenance.check(root, repair=bool(turn % 2)).is_good
        done = maintenance.collect(root, 3 * lab.entry_bytes)
        assert done.left_bytes <= 8 * lab.entry_bytes
        assert maintenance.export_archive(root, tmp_path / "kv.tar").left_out == []
        assert maintenance.import_archive(root, tmp_path / "kv.tar").rejected == []
        # each writer may have one entry in place for which the room is still being made
        assert maintenance.survey(root).size_bytes <= (8 + 2) * lab.entry_bytes
        if turn == 4:
            maintenance.clear(root)
    stop.touch()
    assert all(map(succeeded, children))
    report = maintenance.check(root)
    assert report.is_good
    (namespace,) = report.namespaces
    assert (namespace.missing_rows, namespace.dead_rows, report.foreign_files) == (0, 0, 0)
    store = DiskStore(root, None)
    assert store.stats().size_bytes == sum(p.stat().st_size for p in lab.payloads(root))
    store.close()
