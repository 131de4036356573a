"""Where benches keep their files: a directory that is gone afterwards, if not at once.

Ctrl-C may end a process before it has removed anything, so whoever makes the next directory there
removes what nobody owns any more. An owner holds an exclusive flock on its directory, which the kernel
drops with the process, however it dies: neither clocks nor pids are trusted. Where several machines share
the directory, each has to see the others' locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "blendrag-scratch-"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """An empty directory in ``parent``, by default where the system keeps temporary files."""
    _sweep(parent or Path(tempfile.gettempdir()))
    made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    owner = os.open(made, _FLAGS)
    try:
        with contextlib.suppress(OSError):  # where there are no locks, nobody takes it for dead
            fcntl.flock(owner, fcntl.LOCK_EX)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(owner)


def _sweep(parent: Path) -> None:
    """Remove directories of dead owners. One that is empty may be new, its owner about to lock it."""
    for left in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            claim = os.open(left, _FLAGS)
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.listdir(claim):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(claim)
