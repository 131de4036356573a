"""Files out of the page cache, and whether they left it (:mod:`blendrag.planning.tier_times`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from blendrag.planning.tier_times import COLD_SHARE


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
