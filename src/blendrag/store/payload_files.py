"""Payload files and their directories: written atomically, opened without following links.

Layout of a store's root::

    kv/<namespace>/<ab>/<key>.<nonce>.kv     payloads; <ab> are the key's first two digits
    pinned/<namespace>.<key>                 empty files: keys that are never evicted
    quarantine/                              payloads that were damaged
    tmp/                                     see :mod:`blendrag.store.writers`

All access below ``kv/`` is relative to directory descriptors opened with ``O_NOFOLLOW``, so a
planted symbolic link is refused. Raises plain ``OSError``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from blendrag.store.durable import DIRECTORY, begin_sync, whole_file, write_all
from blendrag.store.identity import is_name, require_name
from blendrag.store.regular_files import open_regular

_CREATE_PIN = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
FILE_NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{16})\.kv", re.ASCII)
PREFIX = re.compile(r"[0-9a-f]{2}", re.ASCII)
PIN_NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{64})", re.ASCII)
NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
#: Quarantined payloads kept for inspection.
QUARANTINE_FILES = 8


class Name(NamedTuple):
    """Where one payload is: ``kv/<namespace>/<ab>/<key>.<nonce>.kv``."""

    namespace: str
    key: str
    nonce: str

    @property
    def entry(self) -> tuple[str, str]:
        return self.namespace, self.key

    @property
    def shard(self) -> tuple[str, str]:
        """The directory below ``kv/``."""
        return self.namespace, self.key[:2]

    @property
    def file(self) -> str:
        return f"{self.key}.{self.nonce}.kv"


def new_name(namespace: str, key: str) -> Name:
    """A name that no file has or had."""
    return Name(namespace, key, secrets.token_hex(8))


class PinnedKeys:
    """Keys that no process evicts: an empty file in ``pinned/`` for each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def add(self, namespace: str, key: str) -> None:
        """Pin a key, durably."""
        with opened(self._directory) as directory:
            os.close(os.open(f"{namespace}.{key}", _CREATE_PIN, 0o600, dir_fd=directory))
            os.fsync(directory)

    def remove(self, namespace: str, key: str) -> None:
        """Unpin a key, if it is pinned."""
        with contextlib.suppress(FileNotFoundError), opened(self._directory) as directory:
            os.unlink(f"{namespace}.{key}", dir_fd=directory)

    def all(self) -> set[tuple[str, str]]:
        """Namespace and key of every pinned key."""
        with contextlib.suppress(FileNotFoundError), opened(self._directory) as directory:
            names = map(PIN_NAME.fullmatch, os.listdir(directory))
            return {(name[1], name[2]) for name in names if name}
        return set()


class PayloadFiles:
    """The payload files of one store, by :class:`Name`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._kv_fd = os.open(root / "kv", DIRECTORY)
        self._durable: set[tuple[str, ...]] = set()
        """Directories whose entry in the directory above is known to be on disk. None is ever removed."""
        self.pinned = PinnedKeys(root / "pinned")

    def close(self) -> None:
        """Close the descriptor of ``kv/``. Idempotent."""
        fd, self._kv_fd = self._kv_fd, -1
        if fd >= 0:
            os.close(fd)

    # -- directories -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _shard(self, shard: tuple[str, str], create: bool = False) -> Iterator[int]:
        """Descriptor of ``kv/<namespace>/<ab>``."""
        with (
            self._entered(self._kv_fd, shard[:1], create) as outer,
            self._entered(outer, shard, create) as inner,
        ):
            yield inner

    @contextlib.contextmanager
    def _entered(self, parent: int, way: tuple[str, ...], create: bool = False) -> Iterator[int]:
        """Descriptor of the last directory of ``way``, which is created on request."""
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(way[-1], 0o700, dir_fd=parent)
                self._durable.discard(way)
        with opened(way[-1], parent) as fd:
            yield fd

    # -- one payload -----------------------------------------------------------------------------

    def open(self, name: Name) -> int:
        """Descriptor of a payload; ``OSError`` unless it is a regular file."""
        with self._shard(name.shard) as directory:
            return open_regular(name.file, dir_fd=directory)

    def _status(self, name: Name) -> os.stat_result | None:
        """``None`` if there is no such payload. Raises ``OSError`` if that is unknown."""
        with _if_any(), self._shard(name.shard) as directory:
            return os.stat(name.file, dir_fd=directory, follow_symlinks=False)
        return None

    def is_gone(self, name: Name) -> bool:
        """Whether there is no such payload. Raises ``OSError`` if that is unknown."""
        return self._status(name) is None

    def exists(self, name: Name) -> bool:
        """Like :meth:`is_gone`; ``False`` if it is unknown."""
        with contextlib.suppress(OSError):
            return not self.is_gone(name)
        return False

    def size(self, name: Name) -> int:
        """Bytes of a payload; 0 if it is gone."""
        return self.size_and_time(name)[0]

    def size_and_time(self, name: Name) -> tuple[int, int]:
        """Bytes of a payload and when it was written, in ns; zeros if it is gone."""
        with contextlib.suppress(OSError):
            if (status := self._status(name)) is not None:
                return status.st_size, status.st_mtime_ns
        return 0, 0

    def write(self, name: Name, temporary: Path, buffers: Iterable[Any]) -> None:
        """Write, sync, rename into place, sync the directory."""
        with (
            self._shard(name.shard, create=True) as directory,
            whole_file(temporary, name.file, directory) as fd,
        ):
            for buffer in buffers:
                write_all(fd, buffer)
                begin_sync(fd)
        self.sync(name.shard)

    def sync(self, shard: tuple[str, str]) -> None:
        """Make the names in one directory durable; the bytes were synced before.

        Directories above that already existed are synced too: their creator may have been
        interrupted. They come last, because the file system's journal then holds them already.
        """
        with self._shard(shard) as directory:
            os.fsync(directory)
        if shard not in self._durable:
            with self._entered(self._kv_fd, shard[:1]) as outer:
                os.fsync(outer)
            self._durable.add(shard)
        if shard[:1] not in self._durable:
            os.fsync(self._kv_fd)
            self._durable.add(shard[:1])

    def remove(self, name: Name) -> None:
        """Unlink a payload, if it is there."""
        with contextlib.suppress(FileNotFoundError), self._shard(name.shard) as directory:
            os.unlink(name.file, dir_fd=directory)

    def quarantine(self, name: Name) -> None:
        """Move a payload to ``quarantine/``, which keeps the newest few."""
        with opened(self._root / "quarantine") as target:
            with self._shard(name.shard) as directory:
                os.rename(name.file, name.file, src_dir_fd=directory, dst_dir_fd=target)
            ages = [
                (status.st_ctime_ns, file)
                for file, status in listed(target)
                if FILE_NAME.fullmatch(file)
            ]
            for _, file in sorted(ages)[:-QUARANTINE_FILES]:
                os.unlink(file, dir_fd=target)

    # -- many payloads ---------------------------------------------------------------------------

    def named(self, namespace: str, key: str) -> list[Name]:
        """The payloads of one key, found by listing its directory."""
        return [name for name in self._list((namespace, key[:2])) if name.key == key]

    def walk(self, namespace: str | None = None) -> Iterator[Name]:
        """Every payload of one namespace, or of all, in order, ignoring foreign names.

        Holds the names of one directory at a time: there may be millions. Raises
        :class:`InvalidInputError` for a malformed namespace.
        """
        if namespace is not None:
            require_name(namespace)
        for each in self._below(".", is_name) if namespace is None else [namespace]:
            for prefix in self._below(each, PREFIX.fullmatch):
                yield from self._list((each, prefix))

    def _below(self, name: str, is_ours: Callable[[str], object]) -> list[str]:
        """Sorted names of our form in a namespace, or in ``"."``."""
        with _if_any(), opened(name, self._kv_fd) as directory:
            return sorted(filter(is_ours, os.listdir(directory)))
        return []

    def _list(self, shard: tuple[str, str]) -> list[Name]:
        with _if_any(), self._shard(shard) as directory:
            matches = map(FILE_NAME.fullmatch, os.listdir(directory))
            return sorted(Name(shard[0], m[1], m[2]) for m in matches if m and m[1][:2] == shard[1])
        return []


@contextlib.contextmanager
def opened(path: Path | str, parent: int | None = None) -> Iterator[int]:
    """Descriptor of a directory, which is not reached through a link."""
    fd = os.open(path, DIRECTORY, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def listed(directory: int) -> list[tuple[str, os.stat_result]]:
    """Names in an open directory and their status, sorted, without what is removed meanwhile."""
    found = []
    for name in sorted(os.listdir(directory)):
        with contextlib.suppress(FileNotFoundError):
            found.append((name, os.stat(name, dir_fd=directory, follow_symlinks=False)))
    return found


@contextlib.contextmanager
def _if_any() -> Iterator[None]:
    """Ignore that there is no such directory, or a file or a link in its place."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in NO_DIRECTORY:
            raise
