"""Folders of uploaded files in the temporary directory, and those that killed servers left there.

Each is under an exclusive flock as long as its file waits. The kernel drops it when the server ends, however
it ends, so a folder that can be locked was left. Clocks and pids are not used.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "blendrag-upload-"


class UploadFolder:
    """A new folder for one file. Raises ``OSError``."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            with suppress(FileNotFoundError, BlockingIOError):  # another server is removing it
                self._lock = _locked(self.path)
                if self.path.exists():
                    return
                os.close(self._lock)

    def remove(self) -> None:
        """With the file in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_left() -> int:
    """Remove this user's folders whose server has ended; returns how many there were."""
    removed = 0
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # a server that runs holds it, or it is another user's
            lock = _locked(path)
            if os.fstat(lock).st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)
                removed += 1
            os.close(lock)
    return removed


def _locked(path: Path) -> int:
    """A descriptor of the directory that holds its lock. Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd
