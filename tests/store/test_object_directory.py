"""A directory as an object store: whole objects, no links in the way, and access for as few as possible."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from blendrag.errors import StoreUnavailableError
from blendrag.store import durable
from blendrag.store.remote.directory import ObjectDirectory
from blendrag.store.remote.objects import RemoteObjects

pytest.importorskip("obstore")

NAME = "kv/n/ab/key.kv"


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir(mode=0o755)
    return tmp_path / "bucket"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Another remote, with an object of the same name."""
    (tmp_path / "outside" / "n" / "ab").mkdir(parents=True)
    (tmp_path / "outside" / "n" / "ab" / "key.kv").write_bytes(b"of others")
    return tmp_path / "outside"


@pytest.fixture
def objects(bucket: Path):
    with contextlib.closing(RemoteObjects(f"file://{bucket}", 5.0)) as opened:
        yield opened


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_put_is_read_listed_and_removed(objects, bucket):
    assert objects.put(NAME, b"bytes", if_absent=True)
    assert not objects.put(NAME, b"other", if_absent=True)
    assert objects.head(NAME) == 5
    assert objects.get(NAME).data == b"bytes"
    assert [(each.name, each.size_bytes) for each in objects.listing("kv/")] == [(NAME, 5)]
    assert objects.put(NAME, b"new", if_absent=False)
    assert objects.get(NAME).data == b"new"
    objects.delete(NAME, "kv/n/ab/never.kv", "nowhere/never.kv")
    assert objects.get(NAME) is None
    assert list(objects.listing("kv/")) == list(objects.listing("nowhere/")) == []


def test_a_file_system_without_hard_links_works(objects, monkeypatch):
    def refused(*args, **kwargs):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    assert objects.put(NAME, b"bytes", if_absent=True)
    assert objects.get(NAME).data == b"bytes"


def test_a_full_disk_leaves_no_object_and_nothing_unfinished(objects, bucket, monkeypatch):
    objects.put(NAME, b"before", if_absent=True)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for name in (NAME, "kv/n/ab/other.kv"):
            with pytest.raises(StoreUnavailableError, match="No space left"):
                objects.put(name, b"after", if_absent=False)
    assert [path.name for path in bucket.rglob("*") if path.is_file()] == ["key.kv"]
    assert objects.get(NAME).data == b"before"
    assert objects.put(NAME, b"after", if_absent=False)


# -- links -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linked", ["kv", "kv/n", "kv/n/ab"])
def test_a_linked_directory_is_not_listed_and_nothing_behind_it_is_changed(
    objects, bucket, outside, linked
):
    parts = linked.split("/")
    link = bucket / linked
    link.parent.mkdir(parents=True, exist_ok=True)
    target = outside.joinpath(*parts[1:])
    link.symlink_to(target)
    victim = outside / "n" / "ab" / "key.kv"
    assert list(objects.listing("kv/")) == []
    for change in (
        lambda: objects.delete(NAME),
        lambda: objects.put(NAME, b"planted", if_absent=False),
        lambda: objects.replace(NAME, b"planted", None),
        lambda: objects.sync(NAME),
    ):
        with pytest.raises(StoreUnavailableError, match="Not a directory"):
            change()
    assert victim.read_bytes() == b"of others"
    assert len(list(victim.parent.iterdir())) == 1


def test_a_directory_that_is_replaced_by_a_link_while_it_is_listed_is_not_followed(
    objects, bucket, outside
):
    objects.put(NAME, b"bytes", if_absent=True)
    objects.put("kv/n/cd/key.kv", b"bytes", if_absent=True)
    listing = objects.listing("kv/")
    listed = [next(listing).name]
    (bucket / "kv" / "n" / "cd").rename(bucket / "moved")
    (bucket / "kv" / "n" / "cd").symlink_to(outside / "n" / "ab")
    listed += [each.name for each in listing]
    assert listed == [NAME]


def test_a_linked_object_is_removed_and_replaced_itself(objects, bucket, outside):
    victim = outside / "n" / "ab" / "key.kv"
    (bucket / "one").symlink_to(victim)
    (bucket / "two").symlink_to(victim)
    with pytest.raises(StoreUnavailableError, match="symbolic link"):
        objects.get("one")
    objects.put("one", b"bytes", if_absent=False)
    objects.delete("two")
    assert victim.read_bytes() == b"of others"
    assert (bucket / "one").read_bytes() == b"bytes"
    assert not os.path.lexists(bucket / "two")


def test_a_linked_lock_is_refused(objects, bucket, tmp_path):
    (bucket / "pointer.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailableError, match="symbolic link"):
        objects.replace("pointer", b"bytes", None)
    assert not (tmp_path / "elsewhere").exists()


def test_a_fifo_in_place_of_an_object_is_refused_without_waiting(objects, bucket):
    os.mkfifo(bucket / "manifest")
    with pytest.raises(StoreUnavailableError, match="not a regular file"):
        objects.get("manifest")


@pytest.mark.parametrize("name", ["../outside", "a/../../b", "/etc/passwd", "a//b", "a/./b", ""])
def test_no_name_leads_out_of_the_directory(bucket, name):
    directory = ObjectDirectory(bucket)
    with pytest.raises(OSError, match="not the name of an object"):
        directory.put(name, b"", if_absent=False)
    with pytest.raises(OSError, match="not the name of an object"):
        directory.delete(name)


# -- access ------------------------------------------------------------------------------------------


def test_others_cannot_read_what_is_put(objects, bucket):
    objects.put(NAME, b"bytes", if_absent=True)
    objects.replace("corpus/pointer", b"bytes", None)
    made = list(bucket.rglob("*"))
    assert {mode(path) for path in made if path.is_dir()} == {0o700}
    assert {mode(path) for path in made if path.is_file()} == {0o600}


def test_the_group_can_use_a_directory_that_it_may_write_to(objects, bucket):
    bucket.chmod(0o2775)
    objects.put(NAME, b"bytes", if_absent=True)
    objects.replace("corpus/pointer", b"bytes", None)
    made = list(bucket.rglob("*"))
    assert {mode(path) & 0o777 for path in made if path.is_dir()} == {0o770}
    assert {mode(path) for path in made if path.is_file()} == {0o660}


# -- processes that are stopped or killed ------------------------------------------------------------


def test_a_lock_that_a_stopped_process_holds_is_an_error_after_a_bounded_wait(
    bucket, objects, monkeypatch
):
    objects.put("pointer", b"before", if_absent=True)
    waited: list[float] = []
    now = iter(range(1000))
    monkeypatch.setattr(durable.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(durable.time, "sleep", waited.append)
    with (bucket / "pointer.lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailableError, match="another process holds it"):
            objects.replace("pointer", b"after", objects.get("pointer"))
    assert 0 < len(waited) < 100
    assert objects.get("pointer").data == b"before"
    assert objects.replace("pointer", b"after", objects.get("pointer"))


def test_what_a_killed_writer_left_is_no_object_and_is_removed_when_it_is_old(objects, bucket):
    objects.put(NAME, b"bytes", if_absent=True)
    left, young = (bucket / f"kv/n/ab/other.kv#{number}" for number in (12, 13))
    for path in (left, young):
        path.write_bytes(b"half")
    os.utime(left, (1000, 1000))
    assert [each.name for each in objects.listing("kv/")] == [NAME]
    assert objects.remove_unfinished(before=2000) == 4
    assert not left.exists()
    assert young.exists()
    assert objects.get(NAME).data == b"bytes"


@pytest.mark.parametrize("name", ["format", NAME])
def test_a_fifo_is_not_waited_for_by_reads_either(objects, bucket, name):
    (bucket / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(bucket / name)
    with pytest.raises(StoreUnavailableError, match="not a regular file"):
        objects.wait(objects.read(name, 0, 256), 300.0)
