"""Who is writing to a store right now, and the temporaries that crashed writers left.

Every writing store holds a marker ``tmp/<id>.writer`` under an exclusive flock and names its
temporaries ``tmp/<id>.<nonce>.part``. The kernel drops the lock when the process ends, however it
ends, so a marker that can be locked belongs to a crashed writer. Clocks and pids are not used.
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

from blendrag.store.durable import CREATE, sync_directory
from blendrag.store.payload_files import opened

MARKER = re.compile(r"([0-9a-f]{16})\.writer", re.ASCII)
PART = re.compile(r"([0-9a-f]{16})\.[0-9a-f]{16}\.part", re.ASCII)
#: Errors of opening a marker that is gone, or is a directory, a link or a socket and so not ours.
_NO_MARKER = (errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.ENXIO)


class WriterClaim:
    """A store's claim to be writing. Create it while holding the index lock."""

    def __init__(self, tmp: Path, make_durable: Callable[[], bool]) -> None:
        """``make_durable`` syncs what was acknowledged; if it returns ``False``, the marker stays.

        It is called when the claim ends, also at interpreter exit, so that a store that was not
        closed does not look crashed.
        """
        self._tmp = tmp
        self._id = secrets.token_hex(8)
        marker = tmp / f"{self._id}.writer"
        fd = os.open(marker, CREATE, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sync_directory(tmp)
        except BaseException:
            remove([marker])
            os.close(fd)
            raise
        #: Ends the claim. In a forked child, only closes the inherited descriptor. Idempotent.
        self.close = weakref.finalize(self, _release, marker, fd, os.getpid(), make_durable)

    def temporary(self) -> Path:
        return new_temporary(self._tmp, self._id)


def _release(marker: Path, fd: int, pid: int, make_durable: Callable[[], bool]) -> None:
    try:
        if os.getpid() == pid and make_durable():
            remove([marker])
    finally:
        os.close(fd)


def new_temporary(tmp: Path, owner: str = "0" * 16) -> Path:
    """A new path to write to. Without an owner, the next process to open the store may remove it."""
    return tmp / f"{owner}.{secrets.token_hex(8)}.part"


def leftovers(tmp: Path) -> tuple[list[Path], list[Path]]:
    """Markers and temporaries of crashed writers. Caller holds the index lock.

    The markers are the only trace of a crash: remove them last. Ignores names that the store does
    not give.
    """
    with opened(tmp) as directory:
        names = os.listdir(directory)
    alive: set[str] = set()
    markers: list[Path] = []
    for match in filter(None, map(MARKER.fullmatch, names)):
        if _is_locked(tmp / match[0]):
            alive.add(match[1])
        else:
            markers.append(tmp / match[0])
    parts = filter(None, map(PART.fullmatch, names))
    return markers, [tmp / part[0] for part in parts if part[1] not in alive]


def remove(paths: Iterable[Path]) -> None:
    """Unlink files that are not behind a link, ignoring errors: what stays is left for the next process."""
    for path in paths:
        with contextlib.suppress(OSError), opened(path.parent) as directory:
            os.unlink(path.name, dir_fd=directory)


def _is_locked(marker: Path) -> bool:
    """Raises ``OSError`` if that is unknown: a living writer must not be taken for a crashed one."""
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
