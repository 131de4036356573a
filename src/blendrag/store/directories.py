"""What every part of the store asks of directories: open them without following, make them and what
is written durable and whole.

Knows no names and no layout.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

#: Flags that open a directory, never one behind a symbolic link.
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Faults of this process, which say nothing about the file that could not be opened.
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

#: Linux' ``sync_file_range``, of which Python knows nothing; ``None`` elsewhere.
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)
_WRITE = 2
_OFFSET = ctypes.c_longlong


def write_all(fd: int, buffer: Any) -> None:
    """Write a whole buffer: any one write may be cut short."""
    view = memoryview(buffer).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def begin_sync(fd: int) -> None:
    """Let the disk begin with what was written so far, while more is written: the fsync that has to
    follow takes as much less. Waits for nothing, makes nothing durable, and hides no error from it."""
    if _SYNC_FILE_RANGE is not None:  # pragma: no branch - every Linux has it, others need none
        _SYNC_FILE_RANGE(fd, _OFFSET(0), _OFFSET(0), _WRITE)


def sync_directory(path: Path) -> None:
    """Make the entries of ``path`` durable: created, renamed or removed, they stay so."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
