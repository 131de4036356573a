"""Stores that cannot be written: chunks are read, every change is one error."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from blendrag.errors import CorruptKVError, StoreUnavailableError
from blendrag.store import maintenance
from blendrag.store.disk import DiskStore
from blendrag.store.tiered import open_store

_libc = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUSER = 0x20000, 0x10000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18


def _call(function: str, *arguments: object) -> None:
    if getattr(_libc, function)(*arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")


def mount_read_only(path: Path) -> None:
    """Bind-mount a directory to itself in a mount namespace of this process, which has one thread."""
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _NEWNS)
    except PermissionError:
        _call("unshare", _NEWNS | _NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _call("mount", None, b"/", None, _REC | _PRIVATE, None)
    _call("mount", bytes(path), bytes(path), None, _BIND | _REC, None)
    _call("mount", None, bytes(path), None, _REMOUNT | _BIND | _RDONLY, None)


@pytest.fixture
def on_read_only_mount(root, fork):
    """Runs a function in a child that sees ``root`` on a mount that cannot be written."""

    def run(action):
        def child():
            try:
                mount_read_only(root)
            except OSError:
                os._exit(77)
            action()

        status = os.waitstatus_to_exitcode(os.waitpid(fork(child), 0)[1])
        if status == 77:
            pytest.skip("this user may not mount anything")
        assert status == 0

    return run


@pytest.fixture(params=["closed", "crashed", "without index"])
def left(lab, root, killed, request):
    """``root`` has three chunks. A crash leaves a WAL, a marker and half a payload, too."""
    kvs = [lab.kv(number) for number in range(3)]

    def crash():
        store = DiskStore(root, 1 << 30)
        for number, kv in enumerate(kvs):
            store.put(lab.namespace, lab.key(number), kv)
        store._writer._claim.temporary().write_bytes(b"half")
        store.close()

    if request.param == "crashed":
        killed(crash, DiskStore, "close")
    else:
        lab.fill(root, range(3))
    if request.param == "without index":
        lab.drop_index(root)
    return request.param


def test_a_store_on_a_read_only_mount_is_read_with_one_warning(
    lab, root, left, on_read_only_mount, caplog
):
    kvs = [lab.kv(number) for number in range(3)]
    new = lab.kv(9)
    before = sorted(root.rglob("*"))

    def use():
        with caplog.at_level(logging.WARNING, "blendrag.store"):
            store = open_store(root, 1 << 20, None)
            assert store.read_only
            for _ in range(2):  # from disk, then from memory
                assert all(lab.is_right(store, n, kv) for n, kv in enumerate(kvs))
                store.drain()
            assert store.stats().tiers[0].entries == 3
            assert lab.open(store, 9) is None
            assert not lab.has(store, 9)
            assert len(list(store.keys(lab.namespace))) == store.stats().entries == 3
            for change in (
                lambda: store.put(lab.namespace, lab.key(9), new),
                lambda: store.delete(lab.namespace, lab.key(1)),
                lambda: store.pin(lab.namespace, lab.key(1)),
            ):
                with pytest.raises(StoreUnavailableError, match="is read-only, expected"):
                    change()
            store.close()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "cannot be written: reads work" in caplog.text

    on_read_only_mount(use)
    assert sorted(root.rglob("*")) == before
    assert lab.intact(root) == [0, 1, 2]  # and once it can be written again


def test_maintenance_of_a_store_on_a_read_only_mount_changes_nothing(
    root, left, tmp_path, on_read_only_mount
):
    before = sorted(root.rglob("*"))
    archive = tmp_path / "kv.tar"

    def use():
        assert maintenance.survey(root).chunks == 3
        report = maintenance.check(root)
        (namespace,) = report.namespaces
        assert (report.is_good, namespace.good) == (True, 3)
        if left == "without index":
            assert report.index == "damaged"
        else:
            assert (report.index, namespace.missing_rows, namespace.dead_rows) == ("sound", 0, 0)
        assert maintenance.export_archive(root, archive).payloads == 3
        for change in (
            lambda: maintenance.check(root, repair=True),
            lambda: maintenance.collect(root, 0),
            lambda: maintenance.clear(root),
            lambda: maintenance.import_archive(root, archive),
        ):
            with pytest.raises(StoreUnavailableError, match="is read-only, expected"):
                change()

    on_read_only_mount(use)
    assert sorted(root.rglob("*")) == before


def test_no_store_is_made_on_a_read_only_mount(root, on_read_only_mount):
    root.mkdir(mode=0o700)

    def use():
        with pytest.raises(StoreUnavailableError, match="holds no store and cannot be written"):
            DiskStore(root, 1 << 30)
        with pytest.raises(StoreUnavailableError, match="Read-only file system while creating"):
            DiskStore(root / "below", 1 << 30)

    on_read_only_mount(use)
    assert list(root.iterdir()) == []


def test_queries_go_on_when_the_disk_of_an_open_store_turns_read_only(lab, filled, monkeypatch):
    """Faked, because a mount with open writers cannot be made read-only."""
    lab.flip(lab.file(filled, 2), -1)
    changes, real_open, real_access = os.O_WRONLY | os.O_RDWR | os.O_CREAT, os.open, os.access

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def open_for_reading(path, flags, *args, **kwargs):
        return (refuse if flags & changes else real_open)(path, flags, *args, **kwargs)

    def access_for_reading(path, mode, **kwargs):
        return not mode & os.W_OK and real_access(path, mode, **kwargs)

    for name in ("rename", "replace", "unlink", "mkdir", "fsync"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(os, "open", open_for_reading)
    monkeypatch.setattr(os, "access", access_for_reading)
    right = []
    thread = threading.Thread(target=lambda: right.append(lab.is_right(filled, 3)))
    thread.start()
    thread.join()
    assert right == [True]
    assert lab.is_right(filled, 1)
    with pytest.raises(CorruptKVError):
        lab.is_right(filled, 2)
    assert lab.open(filled, 2) is None  # not to be set aside, and not believed again
    assert lab.open(filled, 9) is None
    for change in (
        lambda: lab.put(filled, 9),
        lambda: lab.put(filled, 2),
        lambda: filled.delete(lab.namespace, lab.key(1)),
        lambda: filled.pin(lab.namespace, lab.key(1)),
        filled.recover,
    ):
        with pytest.raises(StoreUnavailableError, match="Read-only file system") as caught:
            change()
        assert "\n" not in str(caught.value)
    assert lab.right(filled, (1, 3, 9)) == [1, 3]
    filled.close()
    monkeypatch.undo()
    assert lab.intact(filled.root, (1, 3)) == [1, 3]
    assert not (filled.root / "quarantine" / "index.db").exists()


def snapshot(root):
    return {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}


def test_a_read_only_store_reads_and_changes_nothing(lab, make_store, root):
    os.truncate(lab.file(lab.fill(root, (1, 2)), 2), 100)
    before = snapshot(root)
    reader = make_store(read_only=True)
    assert lab.is_right(reader, 1)
    assert lab.open(reader, 2) is None
    assert lab.open(reader, 2) is None
    assert lab.open(reader, 3) is None
    assert list(reader.keys(lab.namespace)) == [lab.key(1)]
    assert reader.stats().quarantined == 1
    with pytest.raises(StoreUnavailableError, match="read-only"):
        lab.put(reader, 3)
    with pytest.raises(StoreUnavailableError, match="read-only"):
        reader.delete(lab.namespace, lab.key(1))
    reader.close()
    assert snapshot(root) == before
