"""Peak memory of a piece of work, from its own start."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Bytes by which ``work`` raised the process's (or device's) memory at its highest.

    ``None`` where neither Linux's high-water mark nor a CUDA allocator can say.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        _give_back()
        _RESET.write_text("5")  # resets VmHWM to the present size
        before = _status("VmRSS")
        work()
        return max(0, _status("VmHWM") - before)
    except (OSError, KeyError):
        return None


def _give_back() -> None:
    """Return freed memory to the system, so that what an earlier run left is not reused unseen."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # not glibc
        return


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
