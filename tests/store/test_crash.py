"""Crashes, recovery and full disks: what was acknowledged is there, and nothing is left over."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat

import pytest

from blendrag.errors import StoreFullError, StoreUnavailableError
from blendrag.store import maintenance
from blendrag.store.disk import DiskStore
from blendrag.store.index import Index
from blendrag.store.payload_files import PayloadFiles

_SECOND_NS = 10**9


@pytest.fixture
def stored(lab, root):
    """The root of a closed store of chunks 1, 2 and 3."""
    return lab.fill(root, (1, 2, 3))


@pytest.fixture
def without_index(lab, stored):
    lab.drop_index(stored)
    return stored


def temporaries(root):
    return sorted(os.listdir(root / "tmp"))


def assert_complete(lab, root, numbers=(1, 2, 3)):
    assert lab.intact(root) == list(numbers)
    assert len(lab.payloads(root)) == len(numbers)
    assert temporaries(root) == []


# -- kills -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [(os, "replace"), (Index, "add"), (PayloadFiles, "remove")])
def test_a_crash_between_two_steps_of_a_put_is_reconciled(lab, root, killed, step):
    lab.fill(root, (1, 2), limit_bytes=2 * lab.entry_bytes)
    third = lab.kv(3)

    def put():
        DiskStore(root, 2 * lab.entry_bytes).put(lab.namespace, lab.key(3), third)

    killed(put, *step)
    left = lab.intact(root)
    assert temporaries(root) == []
    assert {path.name[:64] for path in lab.payloads(root)} == set(map(lab.key, left))
    assert len(left) <= 2
    assert (3 in left) == (step[0] is Index)


@pytest.mark.parametrize(("step", "kills"), [("add", 2), ("_fill", 1), ("sync", 1)])
def test_a_kill_while_the_index_is_rebuilt_loses_nothing(lab, without_index, killed, step, kills):
    for _ in range(kills):
        killed(lambda: DiskStore(without_index, 1 << 30), Index, step)
    assert_complete(lab, without_index)


def test_a_crash_is_noticed_although_a_forked_child_lives(lab, make_store, root, killed):
    """The child inherits the locks of the index and of the writer's marker."""
    one = lab.kv(1)
    make_store()
    source, sink = os.pipe()

    def crash():
        store = DiskStore(root, 1 << 30)
        store.put(lab.namespace, lab.key(1), one)
        store._writer._claim.temporary().write_bytes(b"half")
        with store._index.exclusive():
            if os.fork() == 0:
                os.write(sink, b"%d" % os.getpid())
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)

    killed(crash)
    child = int(os.read(source, 32))
    try:
        with Index(root / "index").exclusive(0.5):
            assert any(name.endswith(".part") for name in temporaries(root))
        assert_complete(lab, root, [1])
        os.kill(child, 0)  # it is still there
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(source)
        os.close(sink)


def test_a_writer_whose_rows_cannot_be_made_durable_counts_as_crashed(
    lab, store, root, monkeypatch, held
):
    monkeypatch.setattr("blendrag.store.index._SYNC_WAIT_S", 0.01)
    with held():
        store.close()
    assert [name.endswith(".writer") for name in temporaries(root)] == [True]
    assert_complete(lab, root, [1])


# -- rebuilding the index -----------------------------------------------------------------------------


def test_a_failed_rebuild_is_used_by_no_store(lab, filled, make_store, root, monkeypatch):
    with filled._index.exclusive():
        filled._index.set_aside()

    def fail(*args):
        raise StoreFullError("no space left for the index", 1)

    with monkeypatch.context() as patch:
        patch.setattr(Index, "add", fail)
        store = make_store()
        for either in (store, filled):
            assert lab.right(either) == [1, 2, 3]
            assert set(either.keys(lab.namespace)) == set(map(lab.key, (1, 2, 3)))
        with pytest.raises(StoreFullError):
            lab.put(store, 4)
    for either in (store, filled):
        lab.put(either, 4)
        assert either.stats().entries == 4
        either.close()
    assert_complete(lab, root, (1, 2, 3, 4))


@pytest.mark.parametrize(("call", "about"), [("listdir", ""), ("open", ".kv")])
def test_a_rebuild_that_cannot_see_all_files_fails(
    lab, without_index, make_store, failing, call, about
):
    with failing(call, about, errno.EMFILE):
        store = make_store()
        with pytest.raises(StoreUnavailableError, match="Too many open files"):
            store.recover()
    assert lab.right(store) == [1, 2, 3]
    store.close()
    assert_complete(lab, without_index)


def test_recover_handles_files_without_rows_and_rows_without_files(lab, filled, root):
    lab.file(filled, 1).unlink()
    filled._index.drop([filled.find(lab.namespace, lab.key(2))])
    stray = lab.file(filled, 3)
    stray.with_name(f"{lab.key(3)}.{'0' * 16}.kv").write_bytes(stray.read_bytes())
    broken = stray.with_name(f"{lab.key(3)[:2]}{'0' * 62}.{'0' * 16}.kv")
    broken.write_bytes(b"\xff" * 5000)
    (root / "kv" / "README").write_text("mine")
    filled.recover()
    assert lab.right(filled) == [2, 3]
    assert len(lab.payloads(root)) == filled.stats().entries == 2
    assert (root / "quarantine" / broken.name).exists()
    assert (root / "kv" / "README").exists()


@pytest.mark.parametrize("call", ["read", "open", "fstat"])
def test_a_file_that_cannot_be_read_for_a_moment_is_not_set_aside(
    lab, without_index, failing, call
):
    before = lab.descriptors()
    with failing(call, ".kv", times=1):
        DiskStore(without_index, 1 << 30).close()
    assert lab.descriptors() <= before
    assert_complete(lab, without_index)


def test_short_reads_of_headers_are_continued(lab, without_index, monkeypatch):
    real = os.read
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", lambda fd, size: real(fd, min(size, 700)))
        assert_complete(lab, without_index)


@pytest.mark.parametrize(
    ("written", "used", "forgotten", "expected"),
    [
        ({1: 10, 2: 20, 3: 30, 4: 40, 9: 25}, [1, 3, 4, 2], [9], [1, 9, 3, 4, 2]),
        ({1: 10, 2: 20, 3: 30, 8: 50, 9: 40}, [3, 1, 2], [8, 9], [3, 1, 2, 9, 8]),
        ({1: 10, 2: 20, 9: 20}, [1, 2], [9], [1, 9, 2]),
        ({1: 10, 2: 30, 3: 50, 7: 5, 8: 20, 9: 60}, [1, 2, 3], [9, 8, 7], [7, 1, 8, 2, 3, 9]),
        ({**{n: 100 + n for n in range(1, 9)}, 999: 0}, [], [999], [999, *range(1, 9)]),
        ({1: 10, 2: 10**11}, [], [2], [1, 2]),
        ({1: 10, 2: -(10**11)}, [], [2], [2, 1]),
        ({1: 30, 2: 10, 3: 20}, [], [1, 2, 3], [2, 3, 1]),
    ],
)
def test_recovered_files_go_before_what_was_written_later(
    lab, make_store, root, monkeypatch, written, used, forgotten, expected
):
    """``written``: seconds by chunk; ``forgotten``: files that lose their rows, as in a crash."""
    monkeypatch.setattr("blendrag.store.index._PAGE_ROWS", 4)
    store = make_store()
    for number, written_s in written.items():
        lab.put(store, number)
        os.utime(lab.file(store, number), ns=(written_s * _SECOND_NS,) * 2)
    for number in used:
        lab.open(store, number).close()
    store.flush_recency()
    store._index.drop([store.find(lab.namespace, lab.key(number)) for number in forgotten])
    store.recover()
    numbers = {lab.key(number): number for number in written}
    assert [numbers[name.key] for name, _ in store._index.oldest()] == expected
    assert maintenance.check(root).is_good


def test_a_payload_that_vanishes_during_a_rebuild_is_skipped(
    lab, without_index, make_store, monkeypatch
):
    real = PayloadFiles.open

    def vanish(files, name):
        if name.key == lab.key(2):
            files.remove(name)
        return real(files, name)

    monkeypatch.setattr(PayloadFiles, "open", vanish)
    stats = make_store().stats()
    assert (stats.entries, stats.size_bytes, stats.quarantined) == (2, 2 * lab.entry_bytes, 0)


# -- several writers ----------------------------------------------------------------------------------


def test_two_writers_that_fill_the_store_at_once_stay_within_its_limit(
    lab, make_store, root, monkeypatch
):
    limit_bytes = 3 * lab.entry_bytes
    one, two = make_store(limit_bytes), make_store(limit_bytes)
    write = one._files.write

    def write_while_the_other_fills_the_room(*args):
        for number in (11, 12, 13):
            lab.put(two, number)
        write(*args)

    monkeypatch.setattr(one._files, "write", write_while_the_other_fills_the_room)
    lab.put(one, 1)
    assert lab.is_right(one, 1)
    assert one.stats().size_bytes == limit_bytes
    assert len(lab.payloads(root)) == 3


def test_temporaries_of_a_living_writer_are_left_alone(lab, make_store, store, root, failing):
    part = store._writer._claim.temporary()
    part.write_bytes(b"half")
    (root / "tmp" / "notes.part").write_text("mine")
    before = temporaries(root)
    other = make_store()
    other.recover()
    with failing("open", ".writer"):  # a marker in doubt is not that of a dead writer
        with pytest.raises(StoreUnavailableError, match="Input/output error"):
            other.recover()
        assert lab.is_right(make_store(), 1)
    assert temporaries(root) == before
    store.close()
    other.recover()
    assert temporaries(root) == ["notes.part"]


# -- durability, full disks, interrupts ----------------------------------------------------------------


def test_put_is_durable_before_it_is_indexed(lab, store, monkeypatch):
    steps = []

    def noted(step, real):
        def call(*args, **kwargs):
            steps.append(step)
            return real(*args, **kwargs)

        return call

    def fsync(fd):
        steps.append("fsync directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "fsync file")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", noted("rename", os.replace))
    monkeypatch.setattr(store._index, "add", noted("index", store._index.add))
    lab.put(store, 2)
    way = ["fsync directory"]  # of the namespace, whose entry for the file's directory is new
    assert steps == ["fsync file", "rename", "fsync directory", *way, "index"]


def test_a_directory_whose_sync_failed_is_synced_again(lab, store, root, monkeypatch):
    namespace = (root / "kv" / lab.namespace).stat().st_ino
    synced, failing = [], True

    def fsync(fd):
        inode = os.fstat(fd).st_ino
        if inode == namespace and failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synced.append(inode)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        lab.put(store, 2)
    failing = False
    lab.put(store, 2)
    assert namespace in synced


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_says_what_is_needed_and_queries_go_on(lab, store, root, failing, code):
    with (
        failing("write", ".part", code),
        pytest.raises(StoreFullError, match=r"needs [0-9.]+ KiB") as caught,
    ):
        lab.put(store, 2)
    assert caught.value.needed_bytes == lab.entry_bytes
    assert lab.is_right(store, 1)
    assert len(lab.payloads(root)) == 1
    assert not list((root / "tmp").glob("*.part"))
    lab.put(store, 2)
    assert lab.is_right(store, 2)


def test_too_little_free_space_is_noticed_before_writing(lab, store, monkeypatch):
    fields = list(os.statvfs(store.root))
    fields[4] = 1  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    with pytest.raises(StoreFullError, match="free some space") as caught:
        lab.put(store, 2)
    assert caught.value.needed_bytes > lab.entry_bytes
    assert lab.is_right(store, 1)


def test_a_store_on_a_full_disk_is_opened_and_queried(lab, stored, fork):
    fourth = lab.kv(4)

    def query_without_space():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        store = DiskStore(stored, 1 << 30)
        assert all(lab.open(store, number) is not None for number in (1, 2, 3))
        with pytest.raises(StoreFullError):
            store.put(lab.namespace, lab.key(4), fourth)
        assert lab.open(store, 1) is not None
        store.close()

    assert os.waitpid(fork(query_without_space), 0)[1] == 0
    assert not (stored / "quarantine" / "index.db").exists()
    assert_complete(lab, stored)


@pytest.mark.parametrize("call", ["fsync", "replace", "write"])
def test_an_interrupt_during_put_leaves_the_store_usable(lab, store, root, monkeypatch, call):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, call, interrupt)
        with pytest.raises(KeyboardInterrupt):
            lab.put(store, 2)
    assert len(lab.payloads(root)) == 1
    assert not list((root / "tmp").glob("*.part"))
    lab.put(store, 2)
    assert lab.right(store) == [1, 2]
