"""Durable writes, safe directory access, and what an ``OSError`` means for a store."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blendrag.errors import StoreFullError, StoreUnavailableError, is_out_of_space

#: Flags that open a directory and follow no symbolic link.
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Flags that create a file which does not exist.
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: Errors of this process. They say nothing about the file that could not be opened.
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

#: Linux's ``sync_file_range``, which Python does not offer; ``None`` elsewhere.
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)
_WRITE = 2
_OFFSET = ctypes.c_longlong
_LOCK_POLL_S = 0.05


def write_all(fd: int, buffer: Any) -> None:
    """Write a whole buffer; a single ``write`` may be cut short."""
    view = memoryview(buffer).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def begin_sync(fd: int) -> None:
    """Start writing to disk what was written so far, so that the later fsync takes less time.

    Does not wait, makes nothing durable, and leaves all errors to the fsync.
    """
    if _SYNC_FILE_RANGE is not None:  # pragma: no branch - every Linux has it
        _SYNC_FILE_RANGE(fd, _OFFSET(0), _OFFSET(0), _WRITE)


@contextlib.contextmanager
def whole_file(temporary: Path, target: Path | str, dir_fd: int | None = None) -> Iterator[int]:
    """Descriptor of a new file, which is synced and renamed to ``target`` below ``dir_fd``.

    An error in the block removes it. The caller syncs the directory.
    """
    try:
        fd = os.open(temporary, CREATE, 0o600)
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, target, dst_dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def sync_directory(path: Path) -> None:
    """Make the entries of ``path`` durable: files created, renamed or removed there."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock_file(fd: int, kind: int, timeout_s: float) -> None:
    """``flock`` an open file; ``kind`` is ``LOCK_SH`` or ``LOCK_EX``. The kernel frees it with the process.

    Raises :class:`TimeoutError` if another one holds it for that long, for instance a stopped process.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds it") from None
            time.sleep(_LOCK_POLL_S)


def readable_size(size_bytes: float) -> str:
    """``1234567`` → ``"1.2 MiB"``."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} bytes"
    power = min(int(math.log2(size_bytes) / 10), 4)
    return f"{size_bytes / 1024**power:.1f} {'_KMGT'[power]}iB"


@contextlib.contextmanager
def named_errors(doing: str, needed_bytes: int = 0) -> Iterator[None]:
    """Raise the store's error for any ``OSError`` met while ``doing`` something."""
    try:
        yield
    except OSError as exc:
        if is_out_of_space(exc):
            needs = f", which needs {readable_size(needed_bytes)}" if needed_bytes else ""
            raise StoreFullError(
                f"no space left while {doing}{needs}; free some space or choose another store",
                needed_bytes,
            ) from exc
        raise StoreUnavailableError(
            f"{exc.strerror or exc} while {doing}, expected a working disk and a directory of our "
            "own; check it or choose another store"
        ) from exc
