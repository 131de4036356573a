"""Who is writing to a store right now, and whose temporaries are left over from a crash.

Owns ``tmp/``. Every store that writes holds a marker ``tmp/<id>.writer`` under an exclusive flock
and names its temporaries ``<id>.<nonce>.part``. The kernel drops the lock with the process, however
it dies, so a marker that can be locked belongs to nobody: neither clocks nor pids are trusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path

_MARKER = re.compile(r"([0-9a-f]{16})\.writer", re.ASCII)
_PART = re.compile(r"([0-9a-f]{16})\.[0-9a-f]{16}\.part", re.ASCII)


class Writer:
    """This store's claim to be writing. Create it while holding the index lock."""

    def __init__(self, tmp: Path, before_release: Callable[[], None]) -> None:
        """``before_release`` makes durable what this writer acknowledged; it runs before the marker
        goes, also at interpreter exit, so a store that nobody closed does not look crashed."""
        self._tmp = tmp
        self.pid = os.getpid()
        self._id = secrets.token_hex(8)
        marker = tmp / f"{self._id}.writer"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(marker, flags, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        directory = os.open(tmp, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fsync(directory)
        os.close(directory)
        self._release = weakref.finalize(self, _release, marker, fd, os.getpid(), before_release)

    def temporary(self) -> Path:
        """A fresh path to write to."""
        return self._tmp / f"{self._id}.{secrets.token_hex(8)}.part"

    def close(self) -> None:
        """Say that all that was begun is finished. Idempotent."""
        self._release()


def _release(marker: Path, fd: int, pid: int, before_release: Callable[[], None]) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            before_release()
            os.unlink(marker)
    os.close(fd)


def clear_dead(tmp: Path) -> bool:
    """Remove what crashed writers left; whether there was one. Caller holds the index lock.

    Only names that the store itself gives are touched, and nothing of a living writer.
    """
    names = os.listdir(tmp)
    alive, dead = set(), False
    for match in filter(None, map(_MARKER.fullmatch, names)):
        if _is_locked(tmp / match[0]):
            alive.add(match[1])
        else:
            dead = True
            with contextlib.suppress(OSError):
                os.unlink(tmp / match[0])
    for name in names:
        part = _PART.fullmatch(name)
        if part and part[1] not in alive:
            dead = True
            with contextlib.suppress(OSError):
                os.unlink(tmp / name)
    return dead


def _is_locked(marker: Path) -> bool:
    try:
        fd = os.open(marker, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
