"""The threads with which OpenMP computes torch's operators."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec

#: How often a thread of GNU's runtime looks for work before it sleeps: for about 0.1 ms, which is longer than
#: from one operator of a decoded token to the next. The default is about 3 ms.
SPINS = 10_000
#: ``omp_pause_soft`` of OpenMP 5.0.
_PAUSE_SOFT = 1


def sleep_soon() -> None:
    """Let OpenMP threads that wait leave the core to others soon, unless the environment says for how long
    they are to wait. Has an effect only before torch is loaded.

    On a quiet machine nothing changes. Beside programs that compute on the same cores, threads that compute
    would otherwise wait for threads that only look for work: products then took six times as long.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


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
    """``omp_pause_resource_all`` of the runtime that torch was linked to. torch itself (2.13) has no function
    that ends these threads. ``None`` outside of Linux, where torch comes with other runtimes, and if the
    runtime is too old to have it."""
    if sys.platform != "linux":
        return None
    torch = find_spec("torch._C")
    if torch is None or torch.origin is None:
        return None
    library = ctypes.CDLL(torch.origin)  # finds the functions of what it was linked to, too
    return getattr(library, "omp_pause_resource_all", None)
