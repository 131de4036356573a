import errno
import logging
import os
import signal
import stat

import pytest

from blendrag.errors import StoreUnavailableError
from blendrag.store import DiskStore, open_store

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")
no_root = pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")


def assert_refused(root, expectation, read_only=False):
    with pytest.raises(StoreUnavailableError) as caught:
        DiskStore(root, 1 << 30, read_only=read_only)
    message = str(caught.value)
    assert expectation in message
    assert str(root) in message
    assert "--store" in message or "blendrag ingest" in message
    assert "\n" not in message


def test_a_file_is_refused(root):
    root.write_text("a file")
    assert_refused(root, "is a file")
    assert root.read_text() == "a file"


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("a file")
    assert_refused(tmp_path / "file" / "store", "directory")


def test_a_link_to_a_file_is_refused(root):
    root.symlink_to("elsewhere")
    root.parent.joinpath("elsewhere").write_text("a file")
    assert_refused(root, "is a file")


@pytest.mark.parametrize("read_only", [False, True])
def test_a_dangling_link_is_refused(root, read_only):
    root.symlink_to("nowhere")
    assert_refused(root, "a symbolic link to nothing", read_only)
    assert not root.parent.joinpath("nowhere").exists()


def test_a_link_to_a_directory_is_fine(lab, root, tmp_path):
    (tmp_path / "big-disk").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "big-disk")
    store = DiskStore(root, 1 << 30)
    lab.put(store, 1)
    assert lab.is_right(store, 1)
    store.close()


def test_a_directory_that_anyone_can_write_is_refused(root):
    root.mkdir()
    root.chmod(0o777)
    assert_refused(root, "written by every user")
    assert list(root.iterdir()) == []


@needs_root
def test_a_directory_of_another_user_is_refused_for_writing(lab, make_store, root):
    lab.put(make_store(), 1)
    make_store().close()
    os.chown(root, 65534, 65534)
    assert_refused(root, "owned by user 65534")
    reader = make_store(read_only=True)
    assert lab.is_right(reader, 1)


@pytest.mark.parametrize("name", ["kv", "tmp", "index", "quarantine", "pinned"])
def test_a_linked_subdirectory_is_refused(root, tmp_path, name):
    root.mkdir(mode=0o700)
    (tmp_path / "elsewhere").mkdir()
    (root / name).symlink_to(tmp_path / "elsewhere")
    assert_refused(root, "symbolic link")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_in_place_of_a_subdirectory_is_refused(root):
    root.mkdir(mode=0o700)
    (root / "kv").write_text("a file")
    assert_refused(root, "not a directory")


def test_a_store_of_a_newer_version_is_refused_and_untouched(lab, make_store, root):
    store = make_store()
    lab.put(store, 1)
    store.close()
    (root / "format").write_text("blendrag-kv 2\n")
    assert_refused(root, "newer")
    assert_refused(root, "newer", read_only=True)
    assert len(lab.payloads(root)) == 1


def test_a_directory_that_is_something_else_is_refused(root):
    root.mkdir(mode=0o700)
    (root / "format").write_text("tarball")
    assert_refused(root, "not a blendrag store")


def test_reading_where_no_store_is_says_so(root):
    assert_refused(root, "no store at", read_only=True)
    assert not root.exists()


def test_the_root_is_private(make_store, root):
    make_store()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_what_lies_beside_the_store_is_left_alone(lab, make_store, root):
    root.mkdir(mode=0o700)
    (root / "corpus").mkdir()
    (root / "corpus" / "texts.db").write_text("texts")
    store = make_store()
    lab.put(store, 1)
    store.recover()
    assert (root / "corpus" / "texts.db").read_text() == "texts"


def snapshot(root):
    return {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}


def test_a_read_only_store_reads_and_changes_nothing(lab, make_store, root):
    store = make_store()
    for number in (1, 2):
        lab.put(store, number)
    store.close()
    os.truncate(lab.file(store, 2), 100)
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


def test_a_directory_without_write_permission_is_read_with_one_warning(
    lab, make_store, root, monkeypatch, caplog
):
    store = make_store()
    lab.put(store, 1)
    store.close()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode))
    with caplog.at_level(logging.WARNING, "blendrag.store"):
        reader = make_store()
        assert lab.is_right(reader, 1)
        assert lab.open(reader, 2) is None
    assert reader.read_only
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be written" in caplog.text


@no_root
def test_a_directory_without_any_permission_is_refused(root):
    root.mkdir(mode=0o000)
    assert_refused(root, "cannot be read")


def test_open_store_makes_a_usable_store(lab, root):
    store = open_store(root, ram_bytes=1 << 20, disk_bytes=1 << 30)
    lab.put(store, 1)
    assert lab.is_right(store, 1)
    store.close()
    reader = open_store(str(root), ram_bytes=0, disk_bytes=1 << 30, read_only=True)
    assert lab.is_right(reader, 1)
    reader.close()


def assert_no_temporaries(root):
    assert not [path for path in root.iterdir() if path.name.startswith(".")]
    assert list((root / "tmp").iterdir()) == []


def keep(lab, root, numbers, disk_bytes, **kwargs):
    """Opens the store as a process would, puts, and says which entries are there afterwards."""
    store = open_store(root, 0, disk_bytes, **kwargs)
    for number in numbers:
        lab.put(store, number)
    stored = [number for number in range(9) if lab.has(store, number)]
    store.close()
    return stored


def test_a_store_keeps_its_limit_when_opened_without_one(lab, root):
    small = 2 * lab.entry_bytes
    assert keep(lab, root, range(4), 5 * lab.entry_bytes) == [0, 1, 2, 3]
    assert keep(lab, root, [4], None, default_disk_bytes=small) == [0, 1, 2, 3, 4]
    assert keep(lab, root, [5], None, default_disk_bytes=small) == [1, 2, 3, 4, 5]
    assert keep(lab, root, [6], 3 * lab.entry_bytes) == [4, 5, 6]
    assert keep(lab, root, [7], None) == [5, 6, 7]
    assert_no_temporaries(root)


@pytest.mark.parametrize("limit_bytes", [(1 << 63) - 1, 1 << 63, 10**30])
def test_a_store_of_any_size_is_opened_again_without_saying_so(lab, root, limit_bytes):
    assert keep(lab, root, [1], limit_bytes) == [1]
    assert keep(lab, root, [2], None, default_disk_bytes=lab.entry_bytes) == [1, 2]


def test_a_kill_while_the_limit_is_written_down_leaves_nothing_behind(lab, root, fork):
    keep(lab, root, [1], 1 << 30)

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    def killed():
        os.replace = die
        open_store(root, 0, 2 << 30)

    os.waitpid(fork(killed), 0)
    assert keep(lab, root, [], None) == [1]
    assert_no_temporaries(root)


@pytest.mark.parametrize("others", [1, 7])
def test_a_temporary_that_was_taken_for_a_leftover_is_written_again(lab, root, monkeypatch, others):
    """By each of the others who open the store at that moment."""
    keep(lab, root, [1], 1 << 30)
    real, calls = os.replace, []

    def cleared_away(source, target):
        calls.append(target)
        if len(calls) <= others:
            os.unlink(source)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", cleared_away)
        keep(lab, root, [], 2 << 30)
    assert (root / "disk-bytes").read_text() == f"{2 << 30}\n"
    assert_no_temporaries(root)


def test_a_store_that_is_open_without_a_limit_follows_the_one_given_meanwhile(lab, root):
    store = open_store(root, 0, None, default_disk_bytes=lab.entry_bytes)
    assert keep(lab, root, range(3), 4 * lab.entry_bytes) == [0, 1, 2]
    lab.put(store, 3)
    assert all(lab.has(store, number) for number in range(4))
    store.close()


def test_the_default_limit_is_not_remembered(lab, root):
    assert keep(lab, root, range(3), None, default_disk_bytes=2 * lab.entry_bytes) == [1, 2]
    assert keep(lab, root, [3], None, default_disk_bytes=3 * lab.entry_bytes) == [1, 2, 3]


def test_a_damaged_limit_is_refused_rather_than_guessed(lab, root):
    keep(lab, root, [1], 1 << 30)
    (root / "disk-bytes").write_text("many\n")
    with pytest.raises(StoreUnavailableError, match="--disk-bytes"):
        open_store(root, 0, None)
    reader = open_store(root, 0, None, read_only=True)
    assert lab.is_right(reader, 1)
    reader.close()
    assert keep(lab, root, [], 1 << 30) == [1]
    assert keep(lab, root, [], None) == [1]


def test_a_limit_that_cannot_be_written_down_is_used_with_a_warning(lab, root, monkeypatch, caplog):
    keep(lab, root, [1], 1 << 30)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "blendrag.store"):
        patched.setattr(os, "replace", full)
        assert keep(lab, root, [], 2 << 30) == [1]
    assert "remember its limit" in caplog.text
    assert (root / "disk-bytes").read_text() == f"{1 << 30}\n"
    assert_no_temporaries(root)


@pytest.mark.parametrize("name", ["format", "disk-bytes"])
@pytest.mark.parametrize("kind", ["mkfifo", "mkdir"])
def test_something_else_by_the_name_of_a_small_file_is_refused_without_waiting(
    lab, root, name, kind
):
    keep(lab, root, [1], 1 << 30)
    (root / name).unlink()
    getattr(os, kind)(root / name)
    assert_refused(root, "is no regular file")


def test_small_files_are_written_whole_or_not_at_all(lab, root, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: max(1, len(data) // 2)]))
    keep(lab, root, [1], 1 << 30)
    assert (root / "format").read_text() == "blendrag-kv 1\n"
    assert (root / "disk-bytes").read_text() == f"{1 << 30}\n"
    (root / "format").unlink()

    def fail(*args):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(StoreUnavailableError, match="Input/output error"):
            open_store(root, 0, None)
    assert not (root / "format").exists()
    assert_no_temporaries(root)
    assert keep(lab, root, [2], None) == [1, 2]


@pytest.mark.parametrize("name", ["kv", "tmp", "index", "quarantine", "pinned"])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_subdirectory_that_anyone_can_write_is_refused(lab, make_store, root, name, read_only):
    lab.put(make_store(), 1)
    make_store().close()
    (root / name).chmod(0o777)
    assert_refused(root, f"{name} can be written by every user (mode 0777)", read_only)
    (root / name).chmod(0o700)
    assert lab.is_right(make_store(), 1)


def test_a_path_that_no_file_system_takes_is_refused(tmp_path):
    assert_refused(tmp_path / ("x" * 300), "File name too long while creating store")


@pytest.mark.parametrize("times", [1, 19])
def test_a_temporary_that_others_take_for_a_leftover_is_written_again(root, monkeypatch, times):
    """Whoever opens the store clears away what nobody claims; a small file is claimed by nobody."""
    real, left = os.replace, [times]

    def cleared_away(source, target):
        if left[0]:
            left[0] -= 1
            os.unlink(source)
        real(source, target)

    monkeypatch.setattr(os, "replace", cleared_away)
    DiskStore(root, 1 << 30).close()
    assert left == [0]
    assert (root / "format").read_text() == "blendrag-kv 1\n"
    assert_no_temporaries(root)


def test_a_temporary_that_is_taken_away_every_time_is_an_error_with_a_name(root, monkeypatch):
    def cleared_away(source, target):
        os.unlink(source)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os, "replace", cleared_away)
    assert_refused(root, "No such file or directory while writing")
    assert_no_temporaries(root)
