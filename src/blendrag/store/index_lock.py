"""One lock over the index of a store, across threads and processes; nothing of it crosses a fork."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import filelock

from blendrag.store.index_errors import held, unusable


class IndexLock:
    """Held by one thread of one process at a time. Reentrant."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._directory = directory
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._threads = threading.RLock()
        self._processes = filelock.FileLock(self._directory / "lock", mode=0o600)

    @contextlib.contextmanager
    def hold(self, timeout_s: float | None = None) -> Iterator[None]:
        """Raises :class:`IndexLocked` when it is not to be had within ``timeout_s``."""
        if self._pid != os.getpid():  # filelock leaves alone what the parent holds
            self._begin()
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        if not self._threads.acquire(timeout=wait_s):
            raise held(self._directory, "another thread", wait_s)
        try:
            try:
                self._processes.acquire(timeout=wait_s, poll_interval=0.005)
            except filelock.Timeout as exc:
                raise held(self._directory, "another process", wait_s) from exc
            except OSError as exc:
                raise unusable(self._directory, exc.strerror or exc) from exc
            try:
                yield
            finally:
                self._processes.release()
        finally:
            self._threads.release()
