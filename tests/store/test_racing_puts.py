"""Puts beside those who put or clear the same: what is acknowledged is durable, whoever wrote it."""

from __future__ import annotations

import errno
import os

import pytest

from blendrag.errors import StoreUnavailableError
from blendrag.store import DiskStore, maintenance
from blendrag.store.index import IndexLocked
from blendrag.store.payload_files import PayloadFiles


@pytest.fixture
def synced(monkeypatch):
    """Inodes of what was synced so far."""
    inodes = set()
    monkeypatch.setattr(os, "fsync", lambda fd: inodes.add(os.fstat(fd).st_ino))
    return inodes


def way_to(payload, root):
    """Inodes of the directories that have to be durable for a payload to be there."""
    way = [parent for parent in payload.parents if parent.is_relative_to(root / "kv")]
    return {path.stat().st_ino for path in way}


def test_a_chunk_that_is_there_is_acknowledged_once_it_is_durable(lab, make_store, root, synced):
    lab.put(make_store(), 1)
    store = make_store()
    synced.clear()  # as if the other one had only come to that
    lab.put(store, 1)
    assert way_to(lab.file(store, 1), root) <= synced
    assert len(lab.payloads(root)) == 1


def test_what_is_there_only_by_listing_is_made_durable_before_it_is_said_to_be_there(
    lab, make_store, root, monkeypatch, synced
):
    lab.put(make_store(), 1)
    store = make_store()
    synced.clear()
    assert lab.has(store, 1)
    assert not synced  # the index knows only what is durable

    def is_locked(*args):
        raise IndexLocked("the index is held")

    def fail(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(store._index, "get", is_locked)
    assert lab.has(store, 1)
    assert way_to(lab.file(store, 1), root) <= synced
    assert not lab.has(store, 2)
    monkeypatch.setattr(os, "fsync", fail)
    assert not lab.has(store, 1)


def test_who_finds_another_ones_chunk_indexed_in_the_end_keeps_that_one_durably(
    lab, make_store, root, monkeypatch, synced
):
    store, other = make_store(), make_store()
    write = store._files.write

    def slowly(*args):
        write(*args)
        lab.put(other, 1)
        synced.clear()

    monkeypatch.setattr(store._files, "write", slowly)
    lab.put(store, 1)
    assert lab.file(store, 1).parent.stat().st_ino in synced
    assert lab.is_right(store, 1)


def test_a_chunk_that_is_gone_before_it_is_kept_is_put_again(lab, make_store, monkeypatch):
    lab.put(make_store(), 1)
    store = make_store()
    sync = store._files.sync

    def too_late(name):
        monkeypatch.setattr(store._files, "sync", sync)
        directory = lab.file(store, 1).parent
        lab.file(store, 1).unlink()
        directory.rmdir()
        sync(name)

    monkeypatch.setattr(store._files, "sync", too_late)
    lab.put(store, 1)
    assert lab.is_right(store, 1)


@pytest.mark.parametrize("times", [1, 3, 4])
def test_a_directory_that_is_cleared_away_just_before_a_payload_gets_there_is_made_again(
    lab, root, monkeypatch, times
):
    rename, left = os.rename, [times]

    def after_a_clear(source, target, *, dst_dir_fd):
        if left[0]:
            left[0] -= 1
            os.rmdir(f"/proc/self/fd/{dst_dir_fd}/../{target[:2]}")
        return rename(source, target, dst_dir_fd=dst_dir_fd)

    store = DiskStore(root, None)
    monkeypatch.setattr(os, "rename", after_a_clear)
    lab.put(store, 1)
    assert lab.is_right(store, 1)
    assert left == [0]
    assert not list((root / "tmp").glob("*.part"))
    store.close()


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


@pytest.mark.parametrize("times", [1, 4])
def test_a_chunk_cleared_away_before_it_is_indexed_is_put_again(
    lab, make_store, root, cleared_meanwhile, times
):
    store = make_store()
    cleared_meanwhile(times)
    lab.put(store, 1)
    assert lab.is_right(store, 1)
    assert len(lab.payloads(root)) == store.stats().entries == store.stats().puts == 1


def test_a_chunk_that_is_cleared_away_every_time_is_not_acknowledged(
    lab, make_store, root, cleared_meanwhile
):
    store = make_store()
    cleared_meanwhile(100)
    with pytest.raises(
        StoreUnavailableError, match="expected no process to clear the store meanwhile"
    ):
        lab.put(store, 1)
    assert not lab.has(store, 1)
    assert store.stats().entries == store.stats().puts == 0


def test_a_copy_that_a_recovery_removed_as_one_too_many_is_put_again_if_the_other_goes(
    lab, make_store, root, monkeypatch
):
    store, other = make_store(), make_store()
    write = store._files.write

    def meanwhile(*args):
        monkeypatch.setattr(store._files, "write", write)
        lab.put(other, 1)
        write(*args)
        other.recover()
        other.delete(lab.namespace, lab.key(1))

    monkeypatch.setattr(store._files, "write", meanwhile)
    lab.put(store, 1)
    assert lab.is_right(store, 1)


@pytest.fixture
def archive(lab, tmp_path):
    """Of chunk 1."""
    store = DiskStore(tmp_path / "elsewhere", None)
    lab.put(store, 1)
    store.close()
    maintenance.export_archive(tmp_path / "elsewhere", tmp_path / "kv.tar")
    return tmp_path / "kv.tar"


def test_an_import_that_is_cleared_away_meanwhile_says_so(lab, root, archive, cleared_meanwhile):
    cleared_meanwhile(1)
    with pytest.raises(StoreUnavailableError, match=r"removed from store .* repeat the command"):
        maintenance.import_archive(root, archive)
    assert maintenance.import_archive(root, archive).imported == 1
    assert maintenance.check(root).is_good


def test_an_import_makes_durable_what_it_finds_there(lab, root, archive, synced):
    maintenance.import_archive(root, archive)
    synced.clear()
    assert maintenance.import_archive(root, archive).already_there == 1
    (payload,) = lab.payloads(root)
    assert way_to(payload, root) <= synced
