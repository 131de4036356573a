"""Fixtures of the store's tests; also makes ``kv_lab`` importable.

torch is imported in them: the process that deals tests to workers reads this file, too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kv_lab import Lab

    from blendrag.store.disk import DiskStore

sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of this folder are first: many fork, which takes longer, the more memory others have filled."""
    folder = Path(__file__).parent
    items.sort(key=lambda item: not item.path.is_relative_to(folder))


@pytest.fixture
def lab() -> type[Lab]:
    from kv_lab import Lab

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
    from blendrag.store.disk import DiskStore

    with contextlib.ExitStack() as opened:

        def make(limit_bytes: int = 1 << 30, read_only: bool = False) -> DiskStore:
            store = DiskStore(root, limit_bytes, read_only=read_only)
            return opened.enter_context(contextlib.closing(store))

        yield make


@pytest.fixture
def store(make_store, lab):
    """An open store of chunk 1."""
    opened = make_store()
    lab.put(opened, 1)
    return opened


@pytest.fixture
def filled(store, lab):
    """An open store of chunks 1, 2 and 3."""
    for number in (2, 3):
        lab.put(store, number)
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

    def start(action: Callable[[], object]) -> int:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                action()
                os._exit(0)
            os._exit(1)
        children.append(pid)
        return pid

    yield start
    for pid in children:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.fixture
def killed(fork):
    """``killed(action, where, name, turn)``: a child acts and dies at this call of ``where.name``."""

    def run(
        action: Callable[[], object], where: object = None, name: str = "", turn: int = 1
    ) -> None:
        def child() -> None:
            if where is not None:
                real, turns = getattr(where, name), itertools.count(1)

                def dying(*args: object, **kwargs: object) -> object:
                    if next(turns) == turn:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **kwargs)

                setattr(where, name, dying)
            action()

        status = os.waitpid(fork(child), 0)[1]
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL

    return run


@pytest.fixture
def held(root):
    """``with held():``, another process has the index lock."""

    @contextlib.contextmanager
    def lock():
        with open(root / "index" / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    return lock


@pytest.fixture
def locked(root):
    """``with locked():``, another connection has the database of the index for itself."""

    @contextlib.contextmanager
    def lock():
        database = sqlite3.connect(root / "index" / "index.db", isolation_level=None)
        with contextlib.closing(database):
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("BEGIN EXCLUSIVE")
            yield

    return lock
