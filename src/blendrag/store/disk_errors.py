"""What ``OSError`` means for a store: full, or not to be used, in one sentence.

Knows numbers of errors; not who met them.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from blendrag.errors import StoreError, StoreFullError, StoreUnavailableError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def megabytes(size_bytes: int) -> str:
    """``1234567`` → ``"1.2 MB"``."""
    return f"{size_bytes / 1e6:.1f} MB"


def store_error(exc: OSError, doing: str, needed_bytes: int = 0) -> StoreError:
    """Our error for an ``OSError`` met while ``doing`` something; raise it ``from exc``."""
    if exc.errno in _NO_SPACE:
        return StoreFullError(
            f"no space left while {doing}, which needs {megabytes(needed_bytes)}; "
            "free some space or choose another --store",
            needed_bytes,
        )
    return StoreUnavailableError(
        f"{exc.strerror or exc} while {doing}, expected a working disk and a directory of our own; "
        "check it or choose another --store"
    )


@contextlib.contextmanager
def named_errors(doing: str, needed_bytes: int = 0) -> Iterator[None]:
    """``OSError`` met while ``doing`` something as ours."""
    try:
        yield
    except OSError as exc:
        raise store_error(exc, doing, needed_bytes) from exc
