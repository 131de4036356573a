"""The root directory: what is refused, the size limit, and stores that can only be read."""

from __future__ import annotations

import contextlib
import errno
import logging
import os

import pytest

from blendrag.errors import StoreUnavailableError
from blendrag.store import writers
from blendrag.store.disk import DiskStore
from blendrag.store.root import SUBDIRECTORIES
from blendrag.store.tiered import open_store

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")


def assert_refused(root, expectation, read_only=False):
    with pytest.raises(StoreUnavailableError) as caught:
        DiskStore(root, 1 << 30, read_only=read_only)
    message = str(caught.value)
    assert expectation in message
    assert str(root) in message
    assert "another store" in message or "blendrag ingest" in message
    assert "\n" not in message


def made(root, mode=0o700, **files):
    root.mkdir()
    root.chmod(mode)
    for name, text in files.items():
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("make", "expectation"),
    [
        (lambda root: root.write_text("a file"), "is a file"),
        (lambda root: root.symlink_to(__file__), "is a file"),
        (lambda root: root.symlink_to("nowhere"), "a symbolic link to nothing"),
        (lambda root: made(root, 0o777), "written by every user"),
        (lambda root: made(root, kv="a file"), "not a directory"),
        (lambda root: made(root, format="tarball"), "not a blendrag store"),
        (lambda root: made(root, format="blendrag-kv 2\n"), "newer"),
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_directory_that_is_no_safe_store_is_refused_and_unchanged(
    root, make, expectation, read_only
):
    make(root)
    before = set(root.rglob("*"))
    assert_refused(root, expectation, read_only)
    assert set(root.rglob("*")) - {root / "tmp"} == before


@pytest.mark.parametrize("name", ["file/store", "x" * 300])
def test_a_path_that_cannot_be_created_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("a file")
    assert_refused(tmp_path / name, "directory")


def test_a_link_to_a_directory_is_followed(lab, root, tmp_path):
    (tmp_path / "big-disk").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "big-disk")
    assert lab.intact(lab.fill(root, [1])) == [1]


@needs_root
def test_a_directory_of_another_user_is_refused_for_writing(lab, make_store, root):
    os.chown(lab.fill(root, [1]), 65534, 65534)
    assert_refused(root, "owned by user 65534")
    assert_refused(root, "open it with read_only=True (--read-only) or choose another store")
    assert lab.is_right(make_store(read_only=True), 1)


@pytest.mark.parametrize("name", SUBDIRECTORIES)
def test_a_linked_subdirectory_is_refused(root, tmp_path, name):
    root.mkdir(mode=0o700)
    (tmp_path / "elsewhere").mkdir()
    (root / name).symlink_to(tmp_path / "elsewhere")
    assert_refused(root, "symbolic link")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", SUBDIRECTORIES)
def test_a_subdirectory_that_anyone_can_write_is_refused(lab, root, name):
    (lab.fill(root, [1]) / name).chmod(0o777)
    for read_only in (False, True):
        assert_refused(root, f"{name} can be written by every user (mode 0777)", read_only)
    (root / name).chmod(0o700)
    assert lab.intact(root) == [1]


def test_what_holds_no_store_is_not_read(root):
    assert_refused(root, "no store at", read_only=True)
    made(root)
    assert_refused(root, "holds no store", read_only=True)


def test_other_files_in_the_root_are_left_alone(lab, make_store, root):
    made(root, mine="texts")
    lab.fill(root, [1])
    make_store().recover()
    assert (root / "mine").read_text() == "texts"


@pytest.mark.parametrize("read_only", [False, True])
def test_a_root_without_read_permission_is_refused(filled, root, monkeypatch, read_only):
    filled.close()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert_refused(root, "cannot be read by this user", read_only)


# -- the limit and other small files ------------------------------------------------------------------


def assert_no_temporaries(root):
    assert not [path for path in root.iterdir() if path.name.startswith(".")]
    assert list((root / "tmp").iterdir()) == []


def keep(lab, root, numbers, disk_bytes, read_only=False):
    """Open the store as a process would, put, and return the entries that are there afterwards."""
    with contextlib.closing(open_store(root, 0, disk_bytes, read_only)) as store:
        for number in numbers:
            lab.put(store, number)
        return [number for number in range(9) if lab.has(store, number)]


def test_a_store_keeps_its_limit_when_opened_without_one(lab, root, monkeypatch):
    monkeypatch.setattr("blendrag.store.disk.DEFAULT_DISK_BYTES", 2 * lab.entry_bytes)
    assert keep(lab, root, range(4), None) == [2, 3]
    assert not (root / "disk-bytes").exists()
    assert keep(lab, root, range(4), 5 * lab.entry_bytes) == [0, 1, 2, 3]
    assert keep(lab, root, [4], None) == [0, 1, 2, 3, 4]
    assert keep(lab, root, [5], None) == [1, 2, 3, 4, 5]
    assert keep(lab, root, [6], 3 * lab.entry_bytes) == [4, 5, 6]
    assert keep(lab, root, [7], None) == [5, 6, 7]
    for limit_bytes in ((1 << 63) - 1, 10**30):
        keep(lab, root, [], limit_bytes)
        assert keep(lab, root, [8], None) == [5, 6, 7, 8]
    assert_no_temporaries(root)


def test_a_kill_while_the_limit_is_written_leaves_no_temporary(lab, root, killed):
    keep(lab, root, [1], 1 << 30)
    killed(lambda: open_store(root, 0, 2 << 30), os, "replace")
    assert keep(lab, root, [], None) == [1]
    assert_no_temporaries(root)


def test_a_limit_given_meanwhile_is_followed(lab, root, monkeypatch):
    monkeypatch.setattr("blendrag.store.disk.DEFAULT_DISK_BYTES", lab.entry_bytes)
    with contextlib.closing(open_store(root, 0, None)) as store:
        assert keep(lab, root, range(3), 4 * lab.entry_bytes) == [0, 1, 2]
        lab.put(store, 3)
        assert all(lab.has(store, number) for number in range(4))


def test_a_damaged_limit_is_refused(lab, root):
    keep(lab, root, [1], 1 << 30)
    (root / "disk-bytes").write_text("many\n")
    with pytest.raises(StoreUnavailableError, match="--disk-bytes"):
        open_store(root, 0, None)
    assert keep(lab, root, [], None, read_only=True) == [1]
    assert keep(lab, root, [], 1 << 30) == [1]
    assert keep(lab, root, [], None) == [1]


def test_a_limit_that_cannot_be_remembered_is_used_with_a_warning(lab, root, failing, caplog):
    keep(lab, root, [1], 1 << 30)
    with failing("replace", code=errno.ENOSPC), caplog.at_level(logging.WARNING, "blendrag.store"):
        assert keep(lab, root, [], 2 << 30) == [1]
    assert "remember its limit" in caplog.text
    assert (root / "disk-bytes").read_text() == f"{1 << 30}\n"
    assert_no_temporaries(root)


@pytest.mark.parametrize("name", ["format", "disk-bytes"])
@pytest.mark.parametrize("kind", ["mkfifo", "mkdir"])
def test_a_fifo_or_directory_in_place_of_a_small_file_is_refused(lab, root, name, kind):
    keep(lab, root, [1], 1 << 30)
    (root / name).unlink()
    getattr(os, kind)(root / name)
    assert_refused(root, "not a regular file")


@pytest.mark.parametrize("times", [1, 19, 20])
def test_a_small_file_whose_temporary_others_remove_is_written_again(root, monkeypatch, times):
    """Every process that opens the store removes temporaries without a claim."""
    real, left = os.replace, [times]

    def removed_by_others(source, *args, **kwargs):
        if left[0]:
            left[0] -= 1
            os.unlink(source)
        real(source, *args, **kwargs)

    monkeypatch.setattr(os, "replace", removed_by_others)
    if times == 20:
        assert_refused(root, "No such file or directory while writing")
    else:
        DiskStore(root, 1 << 30).close()
        assert (root / "format").read_text() == "blendrag-kv 1\n"
        assert (root / "disk-bytes").read_text() == f"{1 << 30}\n"
    assert left == [0]
    assert_no_temporaries(root)


def test_a_directory_of_temporaries_that_became_a_link_is_not_cleared(root, make_store, tmp_path):
    """They would be those of another store, whose crash would not be noticed."""
    make_store().close()
    other = tmp_path / "other"
    other.mkdir()
    left = [other / f"{'1' * 16}.writer", other / f"{'1' * 16}.{'2' * 16}.part"]
    for path in left:
        path.touch()
    (root / "tmp").rmdir()
    (root / "tmp").symlink_to(other)
    with pytest.raises(OSError, match="Not a directory"):
        writers.leftovers(root / "tmp")
    writers.remove(root / "tmp" / path.name for path in left)
    assert all(path.exists() for path in left)
