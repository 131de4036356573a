"""The directories that payloads lie in, ``kv/<namespace>/<ab>``: entered, made, kept, removed.

Owns what is known of their durability, which is true for as long as nobody removes one. Knows no
files. All access is relative to descriptors with ``O_NOFOLLOW``: a symbolic link planted on the way
is refused, never followed. Raises plain ``OSError``.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from blendrag.store.directories import DIRECTORY

#: What opening a directory says where there is none of ours: nothing, a file, a link not followed.
NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class Shards:
    """Those of one store."""

    def __init__(self, kv: Path) -> None:
        self._kv_fd = os.open(kv, DIRECTORY)
        self._durable: set[tuple[str, ...]] = set()
        """Directories of whose own entry we know that it is on disk."""

    def close(self) -> None:
        """Release the outermost directory. Idempotent."""
        fd, self._kv_fd = self._kv_fd, -1
        if fd >= 0:
            os.close(fd)

    @contextlib.contextmanager
    def entered(self, namespace: str, prefix: str, create: bool = False) -> Iterator[int]:
        """Descriptor of ``kv/<namespace>/<prefix>``, no part of it a symbolic link."""
        outer = self._enter(self._kv_fd, (namespace,), create)
        try:
            inner = self._enter(outer, (namespace, prefix), create)
        finally:
            os.close(outer)
        try:
            yield inner
        finally:
            os.close(inner)

    def _enter(self, parent: int, way: tuple[str, ...], create: bool) -> int:
        """Descriptor of the last directory of ``way``, which is made if it may be; see :meth:`keep`."""
        if create and way not in self._durable:
            self._make(parent, way)
        try:
            return os.open(way[-1], DIRECTORY, dir_fd=parent)
        except FileNotFoundError:
            if not create:
                raise
        self._make(parent, way)  # somebody removed it since
        return os.open(way[-1], DIRECTORY, dir_fd=parent)

    def _make(self, parent: int, way: tuple[str, ...]) -> None:
        self._durable.discard(way)
        with contextlib.suppress(FileExistsError):
            os.mkdir(way[-1], 0o700, dir_fd=parent)

    def keep(self, namespace: str, prefix: str) -> None:
        """Make the directories of a payload durable in those above, once it is itself: by then a file
        system's journal has them already, and this waits for little.

        One that was there is synced, too: whoever made it may not have got to that.
        """
        if (namespace, prefix) not in self._durable:
            outer = self._enter(self._kv_fd, (namespace,), create=False)
            try:
                os.fsync(outer)
            finally:
                os.close(outer)
            self._durable.add((namespace, prefix))
        if (namespace,) not in self._durable:
            os.fsync(self._kv_fd)
            self._durable.add((namespace,))

    def below(self, name: str, is_ours: Callable[[str], object]) -> list[str]:
        """Names in a namespace, or in ``"."``, that are of our form, in order."""
        try:
            fd = os.open(name, DIRECTORY, dir_fd=self._kv_fd)
        except OSError as exc:
            if exc.errno in NO_DIRECTORY:
                return []
            raise
        try:
            return sorted(entry for entry in os.listdir(fd) if is_ours(entry))
        finally:
            os.close(fd)

    def forget(self) -> None:
        """Believe nothing to be durable any more: others may have removed directories and made them anew."""
        self._durable.clear()

    def remove_empty(self, namespace: str, prefixes: list[str]) -> None:
        """Remove those of a namespace, and its own, that have nothing in them.

        Caller is the only one who writes: see :meth:`forget`.
        """
        self.forget()
        for prefix in prefixes:
            with contextlib.suppress(OSError):
                outer = self._enter(self._kv_fd, (namespace,), create=False)
                try:
                    os.rmdir(prefix, dir_fd=outer)
                finally:
                    os.close(outer)
        with contextlib.suppress(OSError):
            os.rmdir(namespace, dir_fd=self._kv_fd)
