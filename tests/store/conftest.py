"""Fixtures of the store's tests; also makes ``kv_lab`` and ``soak`` importable."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blendrag.store import DiskStore

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kv_lab import Lab


@pytest.fixture(scope="package", autouse=True)
def frozen_imports() -> Iterator[None]:
    """Tests that count descriptors collect garbage, which is slow if it visits all of torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def lab() -> type[Lab]:
    return Lab


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fsync: a killed process loses nothing of the page cache."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory if possible: SQLite's own fsyncs would take most of the time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=memory if os.access(memory, os.W_OK) else None, ignore_cleanup_errors=True
    ) as directory:
        yield Path(directory)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def make_store(root: Path):
    """Opens stores at ``root`` and closes them afterwards."""
    opened: list[DiskStore] = []

    def make(limit_bytes: int = 1 << 30, read_only: bool = False) -> DiskStore:
        opened.append(DiskStore(root, limit_bytes, read_only=read_only))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(make_store):
    """An open store of chunk 1."""
    opened = make_store()
    Lab.put(opened, 1)
    return opened


@pytest.fixture
def filled(make_store):
    """An open store of chunks 1, 2 and 3."""
    store = make_store()
    for number in (1, 2, 3):
        Lab.put(store, number)
    return store


@pytest.fixture
def failing(monkeypatch):
    """``with failing("listdir", about="kv"):``, every such call of ``os`` fails."""

    @contextlib.contextmanager
    def fail(name, about="", code=errno.EIO, times=1 << 30):
        real, left = getattr(os, name), [times]

        def call(what, *args, **kwargs):
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            if about in path and left[0]:
                left[0] -= 1
                raise OSError(code, os.strerror(code))
            return real(what, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, call)
            yield

    return fail


@pytest.fixture
def fork():
    """Runs a function in a forked child (no torch operators there); kills what is left over."""
    children: list[int] = []

    def start(action: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                action()
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
        return pid

    yield start
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
