"""Temporary directories of benches, which are removed even if the process is interrupted or killed.

Each owner holds an exclusive flock on its directory, which the kernel releases with the process. The next
bench removes directories without an owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from blendrag.cli import interrupt

PREFIX = "blendrag-scratch-"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """An empty directory in ``parent``, by default the system's directory for temporary files."""
    _remove_abandoned(parent or Path(tempfile.gettempdir()))
    made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    owner = os.open(made, _FLAGS)
    remove = partial(shutil.rmtree, made, ignore_errors=True)
    interrupt.cleanups.append(remove)
    try:
        with contextlib.suppress(OSError):  # without locks, no other bench removes it either
            fcntl.flock(owner, fcntl.LOCK_EX)
        yield made
    finally:
        remove()
        interrupt.cleanups.remove(remove)
        os.close(owner)


def _remove_abandoned(parent: Path) -> None:
    """Remove directories of dead owners. An empty one stays: its owner may be about to lock it."""
    for left in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            claim = os.open(left, _FLAGS)
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.listdir(claim):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(claim)
