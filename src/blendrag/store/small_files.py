"""The small files in a store's root: written whole or not at all, read without following or waiting.

Does not know what they say.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from blendrag.errors import StoreUnavailableError
from blendrag.store.directories import write_all
from blendrag.store.disk_errors import store_error
from blendrag.store.writers import stray_temporary

#: How often a temporary may be taken for a left-over, once by each who opens the store meanwhile.
_TRIES = 20


def replace(path: Path, text: str) -> None:
    """Write a small file of the root, at once and whole."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):  # cleared away by one who opens the store
            return _replace_by(stray_temporary(path.parent / "tmp"), path, text)
    return _replace_by(stray_temporary(path.parent / "tmp"), path, text)


def _replace_by(temporary: Path, path: Path, text: str) -> None:
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, text.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_text(path: Path) -> str | None:
    """The beginning of a small file of ours; ``None`` where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise store_error(exc, f"reading {path}") from exc
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StoreUnavailableError(
                f"{path} is no regular file, expected one made by the store; "
                "move it away or choose another --store"
            )
        return os.read(fd, 64).decode("ascii", "replace")
    except OSError as exc:
        raise store_error(exc, f"reading {path}") from exc
    finally:
        os.close(fd)
