"""Files out of the page cache, and how many of their pages are in it.

``posix_fadvise`` is advice: tmpfs keeps its pages whatever it is told, others may. So what is left is
counted, with ``mincore`` over a mapping that is never touched (a read that must not wait, by
``RWF_NOWAIT``, would begin reading ahead).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

#: So little left is what the kernel was just busy with.
COLD_SHARE = 0.02


def drop(paths: Iterable[Path]) -> None:
    """Ask that these files leave the page cache, once they are on disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def is_cold(share: float) -> bool:
    """Whether what was to leave the page cache did, by the share that is left."""
    return share <= COLD_SHARE


def cached_share(paths: Iterable[Path]) -> float:
    """Share of these files' pages that are in the page cache, in [0, 1]."""
    cached = pages = 0
    for path in paths:
        found = _resident(path)
        cached, pages = cached + sum(found), pages + len(found)
    return cached / pages if pages else 0.0


def _resident(path: Path) -> list[bool]:
    """For every page of a file, whether it is in the page cache."""
    size_bytes = path.stat().st_size
    if not size_bytes:
        return []
    pages = -(-size_bytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
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
