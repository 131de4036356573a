"""Payload files in their directories: written atomically, opened without following anything.

Owns every path below ``kv/`` and ``tmp/`` and the moves between them. Knows neither
the index nor limits nor what is inside a payload. All access is relative to descriptors of their
directories (:mod:`shards`) with ``O_NOFOLLOW``, so a symbolic link planted below the root is refused,
never followed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from blendrag.store.directories import DIRECTORY, begin_sync, write_all
from blendrag.store.format import is_name
from blendrag.store.marks import Marks
from blendrag.store.shards import NO_DIRECTORY, Shards
from blendrag.store.writers import stray_temporary

# O_NONBLOCK: opening a FIFO planted under our name must not hang.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: Of a payload, and of the directory below its namespace's.
FILE_NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{16})\.kv", re.ASCII)
PREFIX = re.compile(r"[0-9a-f]{2}", re.ASCII)
#: How often a directory may be removed, empty as it is, just as a payload is to be moved there.
_TRIES = 5
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
    def shard(self) -> tuple[str, str]:
        """The directory below ``kv/``."""
        return self.namespace, self.key[:2]

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
        self._shards = Shards(root / "kv")

    def close(self) -> None:
        """Release the directory. Idempotent."""
        self._shards.close()

    def temporary(self) -> Path:
        """See :func:`stray_temporary`."""
        return stray_temporary(self._root / "tmp")

    def open(self, name: Name) -> int:
        """Descriptor of a payload; ``OSError`` unless it is a regular file."""
        with self._shards.entered(*name.shard) as directory:
            fd = os.open(name.file, _READ, dir_fd=directory)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(f"{name.file} is not a regular file")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _status(self, name: Name) -> os.stat_result:
        with self._shards.entered(*name.shard) as directory:
            return os.stat(name.file, dir_fd=directory, follow_symlinks=False)

    def exists(self, name: Name) -> bool:
        try:
            self._status(name)
        except OSError:
            return False
        return True

    def is_gone(self, name: Name) -> bool:
        """Whether there is no such payload; unlike :meth:`exists`, sure of it, or ``OSError``."""
        try:
            self._status(name)
        except OSError as exc:
            if exc.errno in NO_DIRECTORY:
                return True
            raise
        return False

    def size(self, name: Name) -> int:
        """Bytes of a payload; 0 if it is gone."""
        try:
            return self._status(name).st_size
        except OSError:
            return 0

    def written_ns(self, name: Name) -> int:
        """When a payload was written, by the clock of then; 0 if it is gone."""
        try:
            return self._status(name).st_mtime_ns
        except OSError:
            return 0

    def write(self, name: Name, temporary: Path, buffers: Iterable[Any]) -> None:
        """Write, fsync, rename into place, fsync the directory; on failure nothing is left."""
        try:
            fd = os.open(temporary, _CREATE, 0o600)
            try:
                for buffer in buffers:
                    write_all(fd, buffer)
                    begin_sync(fd)
                os.fsync(fd)
            finally:
                os.close(fd)
            self._move_in(temporary, name)
            self.sync(name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            with contextlib.suppress(OSError):
                self.remove(name)
            raise

    def _move_in(self, temporary: Path, name: Name) -> None:
        """Rename; once more where the directory, empty so far, was removed between two steps."""
        for _ in range(_TRIES - 1):
            with contextlib.suppress(FileNotFoundError):
                return self._rename(temporary, name)
        return self._rename(temporary, name)

    def _rename(self, temporary: Path, name: Name) -> None:
        with self._shards.entered(*name.shard, create=True) as directory:
            os.rename(temporary, name.file, dst_dir_fd=directory)

    def sync(self, name: Name) -> None:
        """Make durable that there is this payload; its bytes are, as it has a name.

        Whoever gave it that may have been cut short before, or may be about to.
        """
        self.sync_shard(name.shard)

    def sync_shard(self, shard: tuple[str, str]) -> None:
        """:meth:`sync` of every payload that has a name there by now."""
        with self._shards.entered(*shard) as directory:
            os.fsync(directory)
        self._shards.keep(*shard)

    def forget_directories(self) -> None:
        """Let the next :meth:`sync` make the whole way to a payload durable, as the first one did."""
        self._shards.forget()

    def remove(self, name: Name) -> None:
        """Unlink a payload; one that is gone already is no error."""
        with (
            contextlib.suppress(FileNotFoundError),
            self._shards.entered(*name.shard) as directory,
        ):
            os.unlink(name.file, dir_fd=directory)

    def remove_empty_directories(self, namespace: str | None) -> None:
        """Those of a namespace, or of all. Caller is the only one who writes."""
        for name in self._shards.below(".", is_name) if namespace is None else [namespace]:
            self._shards.remove_empty(name, self._shards.below(name, PREFIX.fullmatch))

    def quarantine(self, name: Name) -> None:
        """Move a payload to ``quarantine/``, of which the newest few files are kept."""
        target = os.open(self._root / "quarantine", DIRECTORY)
        try:
            with self._shards.entered(*name.shard) as directory:
                os.rename(name.file, name.file, src_dir_fd=directory, dst_dir_fd=target)
            ages = [
                (os.stat(file, dir_fd=target, follow_symlinks=False).st_ctime_ns, file)
                for file in os.listdir(target)
                if FILE_NAME.fullmatch(file)
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
        for namespace in self._shards.below(".", is_name):
            yield from self.walk_namespace(namespace)

    def walk_namespace(self, namespace: str) -> Iterator[Name]:
        """Every payload of one namespace."""
        for prefix in self._shards.below(namespace, PREFIX.fullmatch):
            yield from self._list(namespace, prefix)

    def _list(self, namespace: str, prefix: str) -> list[Name]:
        try:
            with self._shards.entered(namespace, prefix) as directory:
                files = os.listdir(directory)
        except OSError as exc:
            if exc.errno in NO_DIRECTORY:
                return []
            raise
        matches = (FILE_NAME.fullmatch(file) for file in files)
        return sorted(Name(namespace, m[1], m[2]) for m in matches if m and m[1].startswith(prefix))


def read_at(fd: int, size_bytes: int, offset: int = 0) -> bytes:
    """That many bytes, fewer only where the file ends: any one read may be cut short."""
    parts = []
    while size_bytes > 0 and (part := os.pread(fd, size_bytes, offset)):
        parts.append(part)
        offset += len(part)
        size_bytes -= len(part)
    return b"".join(parts)
