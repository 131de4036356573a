"""Small files read whole and written whole.

Reading takes regular files only, up to a size: a FIFO or a device in the place of a file would block the
reader or fill its memory. Writing goes through a temporary file in the same directory and a rename.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

MIB = 1024**2


def open_regular(path: Path, follow: bool = False) -> int:
    """Descriptor of a regular file. Never blocks. Raises :class:`OSError`.

    ``follow``: also through a symbolic link, for files that the user named. Files of a store are never
    links.
    """
    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def read_bytes(path: Path, limit_bytes: int, follow: bool = False) -> bytes:
    """The whole file. Raises :class:`OSError`, also for what is no regular file or is too large."""
    with os.fdopen(open_regular(path, follow), "rb") as file:
        too_large = os.fstat(file.fileno()).st_size > limit_bytes
        data = b"" if too_large else file.read(limit_bytes + 1)
    if too_large or len(data) > limit_bytes:
        raise OSError(errno.EOVERFLOW, f"larger than {limit_bytes / MIB:g} MiB", str(path))
    return data


def read_text(path: Path, limit_bytes: int, follow: bool = False, encoding: str = "utf-8") -> str:
    """:func:`read_bytes`, decoded, with ``\\n`` line ends. Raises :class:`UnicodeDecodeError`, too."""
    text = read_bytes(path, limit_bytes, follow).decode(encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def replace(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file whole in place of whatever has that name. Raises :class:`OSError`."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
