"""Small files read whole and written whole.

Only regular files up to a size are read: a FIFO would block the reader, a device could fill its
memory. Files are written to a temporary file in the same directory, which is then renamed.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from blendrag.store.durable import whole_file, write_all

MIB = 1024**2


def open_regular(path: Path | str, follow: bool = False, dir_fd: int | None = None) -> int:
    """Descriptor of a regular file, relative to ``dir_fd``. Never blocks. Raises :class:`OSError`.

    ``follow``: also open symbolic links, for files that the user named. Files of a store are never
    links.
    """
    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_bytes(path: Path, limit_bytes: int, follow: bool = False) -> bytes:
    """The whole file. Raises :class:`OSError`, also for a file that is irregular or too large."""
    with os.fdopen(open_regular(path, follow), "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        # read() takes memory for as much as it may return
        parts = [file.read(size_bytes + 1) if size_bytes <= limit_bytes else b""]
        if parts[0] is None:  # a queue of the kernel, such as /proc/kmsg
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        total_bytes = max(size_bytes, len(parts[0]))
        while parts[-1] and total_bytes <= limit_bytes:  # a file that grows, or of /proc
            parts.append(file.read(MIB))
            total_bytes += len(parts[-1])
    if total_bytes > limit_bytes:
        raise OSError(errno.EOVERFLOW, f"larger than {limit_bytes / MIB:g} MiB", str(path))
    return parts[0] if len(parts) <= 2 else b"".join(parts)


def read_text(path: Path, limit_bytes: int, follow: bool = False, encoding: str = "utf-8") -> str:
    """:func:`read_bytes`, decoded, with ``\\n`` line ends. Also raises :class:`UnicodeDecodeError`."""
    text = read_bytes(path, limit_bytes, follow).decode(encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def replace(path: Path, *parts: bytes | memoryview) -> None:
    """Write a whole file, replacing the one at ``path``. Raises :class:`OSError`."""
    with whole_file(path.with_name(f".{secrets.token_hex(8)}.tmp"), path) as fd:
        for part in parts:
            write_all(fd, part)
