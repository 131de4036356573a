"""Only regular files are read, up to a size; a FIFO or a device in their place never blocks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blendrag.errors import InvalidInputError
from blendrag.store import regular_files
from blendrag_lab.evaluation.datasets import read_records


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


def test_a_dataset_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidInputError, match="not a regular file"):
        read_records(tmp_path / "fifo")
