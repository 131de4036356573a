"""Who is writing to a store right now, and whose temporaries are left over from a crash.

Owns ``tmp/``. Every store that writes holds a marker ``tmp/<id>.writer`` under an exclusive flock
and names its temporaries ``<id>.<nonce>.part``. The kernel drops the lock with the process, however
it dies, so a marker that can be locked belongs to nobody: neither clocks nor pids are trusted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from blendrag.store.directories import sync_directory

MARKER = re.compile(r"([0-9a-f]{16})\.writer", re.ASCII)
PART = re.compile(r"([0-9a-f]{16})\.[0-9a-f]{16}\.part", re.ASCII)
#: What opening a marker says where there is none of ours: it is gone, a directory, a link, a socket.
_NO_MARKER = (errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.ENXIO)
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Writer:
    """This store's claim to be writing. Create it while holding the index lock."""

    def __init__(self, tmp: Path, make_durable: Callable[[], bool]) -> None:
        """``make_durable`` says whether all that this writer acknowledged is on disk; otherwise the
        marker stays. It is asked when the claim ends, also at interpreter exit, so a store that
        nobody closed does not look crashed."""
        self._tmp = tmp
        self._id = secrets.token_hex(8)
        marker = tmp / f"{self._id}.writer"
        fd = os.open(marker, _CREATE, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sync_directory(tmp)
        except BaseException:
            remove([marker])
            os.close(fd)
            raise
        self._release = weakref.finalize(self, _release, marker, fd, os.getpid(), make_durable)

    def temporary(self) -> Path:
        """A fresh path to write to."""
        return _part(self._tmp, self._id)

    def is_alone(self) -> bool:
        """Whether nobody else is writing, nor will before the index lock is let go. Caller holds it."""
        markers = filter(None, map(MARKER.fullmatch, os.listdir(self._tmp)))
        others = (marker[0] for marker in markers if marker[1] != self._id)
        return not any(_is_locked(self._tmp / other) for other in others)

    def close(self) -> None:
        """Say that all that was begun is finished. Idempotent."""
        self._release()


def _release(marker: Path, fd: int, pid: int, make_durable: Callable[[], bool]) -> None:
    try:
        if os.getpid() == pid and make_durable():
            remove([marker])
    finally:
        os.close(fd)


def stray_temporary(tmp: Path) -> Path:
    """A fresh path to write to without being a writer: whoever opens the store next may remove it."""
    return _part(tmp, secrets.token_hex(8))


def _part(tmp: Path, owner: str) -> Path:
    return tmp / f"{owner}.{secrets.token_hex(8)}.part"


class Leftovers(NamedTuple):
    """What crashed writers left in ``tmp/``. Without their markers, nobody knows that they were."""

    markers: list[Path]
    parts: list[Path]


def leftovers(tmp: Path) -> Leftovers:
    """What crashed writers left. Caller holds the index lock.

    Only names that the store itself gives are listed, and nothing of a living writer.
    """
    names = os.listdir(tmp)
    alive: set[str] = set()
    markers: list[Path] = []
    for match in filter(None, map(MARKER.fullmatch, names)):
        if _is_locked(tmp / match[0]):
            alive.add(match[1])
        else:
            markers.append(tmp / match[0])
    parts = filter(None, map(PART.fullmatch, names))
    return Leftovers(markers, [tmp / part[0] for part in parts if part[1] not in alive])


def remove(paths: Iterable[Path]) -> None:
    """Unlink files; one that cannot be is found again as a leftover."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _is_locked(marker: Path) -> bool:
    """Raises ``OSError`` where that cannot be found out: a living writer must not be taken for dead."""
    try:
        fd = os.open(marker, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        if exc.errno in _NO_MARKER:
            return False
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
