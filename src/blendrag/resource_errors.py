"""What memory or disk that ran out looks like from Python, whoever ran out of it. Words no message."""

from __future__ import annotations

import errno

#: What torch's allocators and the libraries underneath say; their types are many.
_NO_MEMORY = (
    "can't allocate memory",
    "can't start new thread",
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


def is_out_of_space(error: BaseException) -> bool:
    """Whether a disk is full, or a limit on what may be written is reached."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError) and error.errno in full
