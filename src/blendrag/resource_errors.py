"""What memory, disk or threads that ran out look like from Python, whoever ran out of them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from blendrag.errors import NoThreadError

#: What torch's allocators and the libraries underneath say; their types are many.
_NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "failed to map segment",
    "not enough memory",
    "out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the machine or of a device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(said in str(error).lower() for said in _NO_MEMORY)


def is_out_of_threads(error: BaseException) -> bool:
    """Whether a thread could not be started."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


@contextmanager
def starting_thread() -> Iterator[None]:
    """Raise :class:`NoThreadError` where a thread that is started within cannot be."""
    try:
        yield
    except RuntimeError as exc:
        if is_out_of_threads(exc):
            raise NoThreadError from exc
        raise


def is_out_of_space(error: BaseException) -> bool:
    """Whether a disk is full, or a limit on what may be written is reached."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError) and error.errno in full
