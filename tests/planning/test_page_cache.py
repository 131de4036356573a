"""Whether files left the operating system's cache is counted, not believed."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from blendrag.planning import page_cache


def test_files_whose_pages_cannot_be_counted_are_not_cold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def counted(files: Any) -> float:
        raise OSError(errno.ENOSYS, "mincore")

    monkeypatch.setattr(page_cache, "cached_share", counted)
    assert not page_cache.forget([])


def test_pages_in_the_cache_are_counted(tmp_path: Path) -> None:
    path, empty = tmp_path / "file", tmp_path / "empty"
    path.write_bytes(bytes(40 * mmap.PAGESIZE + 1))
    empty.touch()
    assert page_cache.cached_share([path, empty]) > 0.5
    assert page_cache.cached_share([empty]) == 0.0
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        if page_cache.forget([path, empty]):
            assert page_cache.cached_share([path, empty]) < 0.5


def test_pages_that_stay_at_first_are_asked_to_leave_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = iter([0.5, 0.0])
    monkeypatch.setattr(page_cache, "cached_share", lambda files: next(shares))
    assert page_cache.forget([]) == hasattr(os, "posix_fadvise")
