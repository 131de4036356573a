"""Only regular files are read, up to a size; a FIFO or a device in their place never blocks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blendrag.errors import InvalidInputError
from blendrag.fusor import gate as verdicts
from blendrag.lab.evaluation.records import read_records
from blendrag.planning import calibration as schedules
from blendrag.planning import profile_record as profiles
from blendrag.planning.storage import read_devices
from blendrag.store import regular_files


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    regular_files.replace(file, b"one\r\n", memoryview(b"two"))
    assert regular_files.read_text(file, 8) == "one\ntwo"
    regular_files.replace(file, b"three")
    assert regular_files.read_bytes(file, 5) == b"three"
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_no_regular_file_is_an_error_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for path in (tmp_path / "fifo", tmp_path / "zero", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            regular_files.read_bytes(path, 100, follow=True)
    with pytest.raises(OSError, match="symbolic links"):
        regular_files.read_bytes(tmp_path / "link", 100)
    assert regular_files.read_bytes(tmp_path / "link", 100, follow=True) == b"text"


def test_a_file_above_the_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="larger than 1 MiB"):
        regular_files.read_bytes(tmp_path / "large", regular_files.MIB)


@pytest.mark.parametrize("hostile", ["fifo", "zero", "directory"])
def test_a_record_that_is_no_file_counts_as_none(tmp_path: Path, hostile: str) -> None:
    import torch

    (tmp_path / "verified").mkdir()
    for suffix in ("", ".schedules", ".profiles"):
        path = tmp_path / "verified" / f"ns{suffix}.json"
        if hostile == "fifo":
            os.mkfifo(path)
        elif hostile == "zero":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
    assert verdicts.remembered(tmp_path, "ns", torch.device("cpu")) is None
    assert schedules.recall(tmp_path, "ns") == ()
    assert profiles._entries(tmp_path, "ns") == []


def test_a_record_nested_too_deeply_counts_as_none(tmp_path: Path) -> None:
    import torch

    (tmp_path / "verified").mkdir()
    for suffix in ("", ".schedules", ".profiles"):
        (tmp_path / "verified" / f"ns{suffix}.json").write_text("[" * 200_000)
    assert verdicts.remembered(tmp_path, "ns", torch.device("cpu")) is None
    assert schedules.recall(tmp_path, "ns") == ()
    assert profiles._kept(tmp_path, "ns") == []


def test_lists_of_devices_and_datasets_are_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidInputError, match="not a regular file"):
        read_devices(tmp_path / "fifo")
    with pytest.raises(InvalidInputError, match="not a regular file"):
        read_records(tmp_path / "fifo")
