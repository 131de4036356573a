"""What every part of the store asks of directories: open them without following, make them durable.

Knows no names and no layout.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

#: Flags that open a directory, never one behind a symbolic link.
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Faults of this process, which say nothing about the file that could not be opened.
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def sync_directory(path: Path) -> None:
    """Make the entries of ``path`` durable: created, renamed or removed, they stay so."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
