"""Keys that are never evicted, by whichever process: empty files in ``pinned/`` that bear their names.

Knows no payloads. Raises plain ``OSError``.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from blendrag.store.directories import DIRECTORY

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
MARK = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{64})", re.ASCII)


class Marks:
    """The marks of one store."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def add(self, namespace: str, key: str) -> None:
        """Mark a key, durably."""
        directory = os.open(self._directory, DIRECTORY)
        try:
            os.close(os.open(f"{namespace}.{key}", _CREATE, 0o600, dir_fd=directory))
            os.fsync(directory)
        finally:
            os.close(directory)

    def remove(self, namespace: str, key: str) -> None:
        """Remove a key's mark, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            directory = os.open(self._directory, DIRECTORY)
            try:
                os.unlink(f"{namespace}.{key}", dir_fd=directory)
            finally:
                os.close(directory)

    def all(self) -> set[tuple[str, str]]:
        """Namespace and key of every mark."""
        try:
            directory = os.open(self._directory, DIRECTORY)
        except FileNotFoundError:
            return set()
        try:
            marks = map(MARK.fullmatch, os.listdir(directory))
            return {(mark[1], mark[2]) for mark in marks if mark}
        finally:
            os.close(directory)
