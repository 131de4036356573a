"""Objects as files of a directory (``file://``): a power cut leaves each of them whole or as it was.

obstore makes nothing durable and follows symbolic links, so changes, listings and small objects come here.
All access is relative to directory descriptors opened with ``O_NOFOLLOW``: only the directory itself may be
a link. Users other than the owner get access only if the group may write to the directory. Raises plain
``OSError``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from blendrag.store.durable import CREATE, DIRECTORY, lock_file, write_all
from blendrag.store.payload_files import NO_DIRECTORY, listed, opened
from blendrag.store.regular_files import open_regular

#: How a file is named that is being written. obstore does not list such names either.
_UNFINISHED = re.compile(r".+#[0-9]+", re.ASCII)
#: Errors of ``link`` on file systems that have no hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Listed(NamedTuple):
    """An object in a listing."""

    name: str
    size_bytes: int
    modified: float
    """Unix time, by the clock of the store."""


class ObjectDirectory:
    """Names are relative, with ``/`` between directories. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, name: str, data: bytes | bytearray, if_absent: bool) -> bool:
        """Write an object whole and durably; ``False`` if there is one already and ``if_absent``."""
        with self._parent(name, create=True) as (parent, file):
            unfinished = f"{file}#{secrets.randbelow(10**18)}"
            fd = os.open(unfinished, CREATE, 0o600, dir_fd=parent)
            try:
                try:
                    write_all(fd, data)
                    self._share(fd, 0o660)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                is_new = self._name(parent, unfinished, file, if_absent)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(unfinished, dir_fd=parent)
        if is_new:
            self._sync_directories(name)
        else:
            self.sync(name)  # another machine may just have written it
        return is_new

    def _name(self, parent: int, unfinished: str, file: str, if_absent: bool) -> bool:
        """Give a written file its name."""
        if if_absent:
            try:
                os.link(unfinished, file, src_dir_fd=parent, dst_dir_fd=parent)
                return True
            except FileExistsError:
                return False
            except OSError as exc:
                if exc.errno not in _NO_LINKS:
                    raise  # else it is replaced: equal names have equal contents
        os.replace(unfinished, file, src_dir_fd=parent, dst_dir_fd=parent)
        return True

    def get(self, name: str, most_bytes: int) -> tuple[bytes, int] | None:
        """An object's bytes, none if it has more than ``most_bytes``, and its size; ``None`` without one.

        Anything but a regular file is an error, and not waited for.
        """
        with contextlib.suppress(FileNotFoundError), self._parent(name) as (parent, file):
            fd = open_regular(file, dir_fd=parent)
            with os.fdopen(fd, "rb") as opened:
                size_bytes = os.fstat(fd).st_size
                return (opened.read() if size_bytes <= most_bytes else b""), size_bytes
        return None

    def check(self, name: str) -> None:
        """Raise an error unless an object is there and a regular file."""
        with self._parent(name) as (parent, file):
            os.close(open_regular(file, dir_fd=parent))

    def delete(self, *names: str) -> None:
        """Remove objects, if they are there. What a link in the way leads to is not touched."""
        for name in names:
            with contextlib.suppress(FileNotFoundError), self._parent(name) as (parent, file):
                os.unlink(file, dir_fd=parent)

    def sync(self, name: str) -> None:
        """Make an object durable that somebody else wrote."""
        with self._parent(name) as (parent, file):
            fd = open_regular(file, dir_fd=parent)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        self._sync_directories(name)

    def listing(self, prefix: str) -> Iterator[Listed]:
        """Objects below ``prefix``, which ends with ``/``. Links are not followed and not listed."""
        for name, status in self._files(tuple(prefix.strip("/").split("/"))):
            if not _UNFINISHED.fullmatch(name):
                yield Listed(name, status.st_size, status.st_mtime)

    def redate(self, name: str) -> None:
        """Give an object, if it is there, the present time."""
        with contextlib.suppress(FileNotFoundError), self._parent(name) as (parent, file):
            os.utime(file, dir_fd=parent, follow_symlinks=False)

    def remove_unfinished(self, before: float) -> int:
        """Remove what killed writers left, if it was written before a Unix time; its bytes."""
        size_bytes = 0
        for name, status in self._files(()):
            if _UNFINISHED.fullmatch(name) and status.st_mtime < before:
                self.delete(name)
                size_bytes += status.st_size
        return size_bytes

    @contextlib.contextmanager
    def locked(self, name: str, timeout_s: float) -> Iterator[None]:
        """Hold the lock of an object, also against other machines if the directory is shared by NFS.

        Raises :class:`TimeoutError` if another process holds it for that long, for instance a stopped one.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with self._parent(name, create=True) as (parent, file):
            fd = os.open(f"{file}.lock", flags, 0o600, dir_fd=parent)
        try:
            with contextlib.suppress(PermissionError):  # another user of the group made it
                self._share(fd, 0o660)
            lock_file(fd, fcntl.LOCK_EX, timeout_s)
            yield
        finally:
            os.close(fd)

    # -- directories -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _parent(self, name: str, create: bool = False) -> Iterator[tuple[int, str]]:
        """Descriptor of the directory that an object is in, and the name of its file."""
        *way, file = name.split("/")
        if any(part in ("", ".", "..") for part in (*way, file)):
            raise OSError(errno.EINVAL, "not the name of an object", name)
        with self._opened(way, create) as fd:
            yield fd, file

    @contextlib.contextmanager
    def _opened(self, way: Sequence[str], create: bool = False) -> Iterator[int]:
        """Descriptor of a directory, whose way from the top goes through no link."""
        fd = os.open(self.path, DIRECTORY & ~os.O_NOFOLLOW)
        try:
            for part in way:
                if create:
                    self._make(part, fd)
                below = os.open(part, DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def _make(self, part: str, parent: int) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, 0o700, dir_fd=parent)
            with opened(part, parent) as fd:
                self._share(fd, 0o770)

    def _share(self, fd: int, mode: int) -> None:
        """Let the group use what this process has made, if the directory is its group's."""
        status = os.fstat(fd)
        if self.path.stat().st_mode & stat.S_IWGRP and status.st_uid == os.geteuid():
            os.fchmod(fd, mode | status.st_mode & stat.S_ISGID)

    def _sync_directories(self, name: str) -> None:
        """Make the entries durable by which an object is found."""
        way = name.split("/")[:-1]
        for depth in range(len(way), -1, -1):
            with contextlib.suppress(OSError), self._opened(way[:depth]) as fd:
                os.fsync(fd)  # not every file system syncs directories

    def _files(self, way: tuple[str, ...]) -> Iterator[tuple[str, os.stat_result]]:
        """Names and status of regular files below a directory, if there is one."""
        try:
            with self._opened(way) as directory:
                found = listed(directory)
        except OSError as exc:
            if exc.errno in NO_DIRECTORY and way:
                return
            raise
        for name, status in found:
            if stat.S_ISDIR(status.st_mode):
                yield from self._files((*way, name))
            elif stat.S_ISREG(status.st_mode):
                yield "/".join((*way, name)), status
