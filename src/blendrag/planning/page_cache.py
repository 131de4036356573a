"""Files out of the operating system's cache, and whether they left it.

``posix_fadvise`` is advice: tmpfs keeps its pages whatever it is told, others may. So what is left is
counted, with ``mincore`` over a mapping that is never touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

#: So little left is what the kernel was just busy with.
COLD_SHARE = 0.02
#: Somebody else may read, or the kernel be busy, while pages are to leave.
TRIES = 3


def forget(files: Sequence[Path]) -> bool:
    """Ask that these files, which are on disk already, leave the cache; whether they did.

    ``False``, too, where the system cannot be asked.
    """
    return hasattr(os, "posix_fadvise") and any(_left(files) for _ in range(TRIES))


def _left(files: Sequence[Path]) -> bool:
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    try:
        return cached_share(files) <= COLD_SHARE
    except (OSError, AttributeError):
        return False


def cached_share(files: Sequence[Path]) -> float:
    """Share of these files' pages that are in the cache, in [0, 1]. Raises :class:`OSError`."""
    pages = [page for path in files for page in _resident(path)]
    return sum(pages) / len(pages) if pages else 0.0


def _resident(path: Path) -> list[bool]:
    """For every page of a file, whether it is in the cache."""
    size_bytes = path.stat().st_size
    if not size_bytes:
        return []
    found = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        first = ctypes.c_ubyte.from_buffer(mapping)
        try:
            address = ctypes.c_void_p(ctypes.addressof(first))
            if libc.mincore(address, ctypes.c_size_t(size_bytes), found):
                raise OSError(ctypes.get_errno(), "mincore", str(path))
        finally:
            del first  # a mapping that is pointed into cannot be closed
    return [bool(page & 1) for page in found]
