"""What every part of the store asks of directories: open them without following, make them and what
is written durable and whole.

Knows no names and no layout.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

#: Flags that open a directory, never one behind a symbolic link.
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Faults of this process, which say nothing about the file that could not be opened.
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def write_all(fd: int, buffer: Any) -> None:
    """Write a whole buffer: any one write may be cut short."""
    view = memoryview(buffer).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def sync_directory(path: Path) -> None:
    """Make the entries of ``path`` durable: created, renamed or removed, they stay so."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
