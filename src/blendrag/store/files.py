"""Payload files in their directories: written atomically, opened without following anything.

Owns every path below ``kv/`` and ``tmp/`` and the moves between them. Knows neither
the index nor limits nor what is inside a payload. All access is relative to directory descriptors
with ``O_NOFOLLOW``, so a symbolic link planted below the root is refused, never followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from blendrag.store.directories import DIRECTORY, begin_sync, write_all
from blendrag.store.format import is_name
from blendrag.store.marks import Marks

# O_NONBLOCK: opening a FIFO planted under our name must not hang.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{16})\.kv", re.ASCII)
_HEX2 = re.compile(r"[0-9a-f]{2}", re.ASCII)
#: What opening a directory says where there is none of ours: nothing, a file, a link not followed.
_NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

#: Quarantined payloads kept for inspection; older ones make room.
QUARANTINE_FILES = 8


class Name(NamedTuple):
    """Where one payload lies: ``kv/<namespace>/<ab>/<key>.<nonce>.kv``."""

    namespace: str
    key: str
    nonce: str

    @property
    def entry(self) -> tuple[str, str]:
        """What the payload is of: namespace and key."""
        return self.namespace, self.key

    @property
    def file(self) -> str:
        return f"{self.key}.{self.nonce}.kv"


def new_name(namespace: str, key: str) -> Name:
    """A name that no file has or had."""
    return Name(namespace, key, secrets.token_hex(8))


class PayloadFiles:
    """The files of one store, by :class:`Name`. Raises plain ``OSError``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.marks = Marks(root / "pinned")
        self._kv_fd = os.open(root / "kv", DIRECTORY)
        self._durable: set[tuple[str, ...]] = set()
        """Directories below ``kv/`` of whose own entry we know that it is on disk."""

    def close(self) -> None:
        """Release the directory. Idempotent."""
        fd, self._kv_fd = self._kv_fd, -1
        if fd >= 0:
            os.close(fd)

    def open(self, name: Name) -> int:
        """Descriptor of a payload; ``OSError`` unless it is a regular file."""
        with self._directory(name.namespace, name.key[:2]) as directory:
            fd = os.open(name.file, _READ, dir_fd=directory)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(f"{name.file} is not a regular file")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def exists(self, name: Name) -> bool:
        try:
            with self._directory(name.namespace, name.key[:2]) as directory:
                os.stat(name.file, dir_fd=directory, follow_symlinks=False)
        except OSError:
            return False
        return True

    def is_gone(self, name: Name) -> bool:
        """Whether there is no such payload; unlike :meth:`exists`, sure of it, or ``OSError``."""
        try:
            with self._directory(name.namespace, name.key[:2]) as directory:
                os.stat(name.file, dir_fd=directory, follow_symlinks=False)
        except OSError as exc:
            if exc.errno in _NO_DIRECTORY:
                return True
            raise
        return False

    def size(self, name: Name) -> int:
        """Bytes of a payload; 0 if it is gone."""
        try:
            with self._directory(name.namespace, name.key[:2]) as directory:
                return os.stat(name.file, dir_fd=directory, follow_symlinks=False).st_size
        except OSError:
            return 0

    def write(self, name: Name, temporary: Path, buffers: Iterable[Any]) -> None:
        """Write, fsync, rename into place, fsync the directory; on failure nothing is left."""
        with self._directory(name.namespace, name.key[:2], create=True) as directory:
            try:
                fd = os.open(temporary, _CREATE, 0o600)
                try:
                    for buffer in buffers:
                        write_all(fd, buffer)
                        begin_sync(fd)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                os.rename(temporary, name.file, dst_dir_fd=directory)
                os.fsync(directory)
                self._keep(name.namespace, name.key[:2])
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                with contextlib.suppress(OSError):
                    os.unlink(name.file, dir_fd=directory)
                raise

    def remove(self, name: Name) -> None:
        """Unlink a payload; one that is gone already is no error."""
        with (
            contextlib.suppress(FileNotFoundError),
            self._directory(name.namespace, name.key[:2]) as directory,
        ):
            os.unlink(name.file, dir_fd=directory)

    def quarantine(self, name: Name) -> None:
        """Move a payload to ``quarantine/``, of which the newest few files are kept."""
        target = os.open(self._root / "quarantine", DIRECTORY)
        try:
            with self._directory(name.namespace, name.key[:2]) as directory:
                os.rename(name.file, name.file, src_dir_fd=directory, dst_dir_fd=target)
            ages = [
                (os.stat(file, dir_fd=target, follow_symlinks=False).st_ctime_ns, file)
                for file in os.listdir(target)
                if _FILE_NAME.fullmatch(file)
            ]
            for _, file in sorted(ages)[:-QUARANTINE_FILES]:
                os.unlink(file, dir_fd=target)
        finally:
            os.close(target)

    def named(self, namespace: str, key: str) -> list[Name]:
        """Files of one key, found by listing its directory."""
        return [name for name in self._list(namespace, key[:2]) if name.key == key]

    def walk(self) -> Iterator[Name]:
        """Every payload of the store, in order; names that the store never gives are passed over.

        Holds the names of one directory at a time: there may be millions.
        """
        for namespace in self._subdirectories(".", is_name):
            yield from self.walk_namespace(namespace)

    def walk_namespace(self, namespace: str) -> Iterator[Name]:
        """Every payload of one namespace."""
        for prefix in self._subdirectories(namespace, _HEX2.fullmatch):
            yield from self._list(namespace, prefix)

    def _list(self, namespace: str, prefix: str) -> list[Name]:
        try:
            with self._directory(namespace, prefix) as directory:
                files = os.listdir(directory)
        except OSError as exc:
            if exc.errno in _NO_DIRECTORY:
                return []
            raise
        matches = (_FILE_NAME.fullmatch(file) for file in files)
        return sorted(Name(namespace, m[1], m[2]) for m in matches if m and m[1].startswith(prefix))

    def _subdirectories(self, name: str, is_ours: Callable[[str], object]) -> list[str]:
        try:
            fd = os.open(name, DIRECTORY, dir_fd=self._kv_fd)
        except OSError as exc:
            if exc.errno in _NO_DIRECTORY:
                return []
            raise
        try:
            return sorted(entry for entry in os.listdir(fd) if is_ours(entry))
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _directory(self, namespace: str, prefix: str, create: bool = False) -> Iterator[int]:
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
        """Descriptor of the last directory of ``way``, which is made if it may be; see :meth:`_keep`."""
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

    def _keep(self, namespace: str, prefix: str) -> None:
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


def read_at(fd: int, size_bytes: int, offset: int = 0) -> bytes:
    """That many bytes, fewer only where the file ends: any one read may be cut short."""
    parts = []
    while size_bytes > 0 and (part := os.pread(fd, size_bytes, offset)):
        parts.append(part)
        offset += len(part)
        size_bytes -= len(part)
    return b"".join(parts)
