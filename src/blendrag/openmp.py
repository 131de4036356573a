"""The threads with which OpenMP computes torch's operators."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

#: ``omp_pause_soft`` of OpenMP 5.0.
_PAUSE_SOFT = 1


def end_workers() -> None:
    """End the OpenMP threads of the calling thread; its next parallel operator starts others.

    Every thread that computes has OpenMP threads of its own. As soon as a process has more of them than
    cores, GNU's runtime lets each sleep after every operator, and waking it takes longer than most operators
    of a decoded token. So threads that compute now and then end theirs before the model goes on.
    """
    pause = _pause()
    if pause is not None:
        pause(_PAUSE_SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the runtime that torch (2.13) was linked to, which does not export it;
    ``None`` where that runtime does not let its threads sleep, or is too old."""
    if sys.platform != "linux":
        return None
    import torch

    library = ctypes.CDLL(torch._C.__file__)  # finds the functions of what it was linked to, too
    return getattr(library, "omp_pause_resource_all", None)
