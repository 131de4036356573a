"""What the machine has: its processor, and the memory that is free."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def processor_name() -> str:
    with suppress(OSError, UnicodeDecodeError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def available_bytes() -> int:
    """Memory that new allocations may take without swapping, in the machine and in this container."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
        available = int(found.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min([available, *_left_by_groups()])


class ControlGroups(NamedTuple):
    """A version of Linux' control groups, which limit the memory of containers."""

    root: Path
    controller: str
    """Its name among the groups of a process."""
    limit: str
    used: str
    droppable: str
    """The page cache in ``used``, by its name in ``memory.stat``."""


CONTROL_GROUPS = (
    ControlGroups(Path("/sys/fs/cgroup"), "", "memory.max", "memory.current", "inactive_file"),
    ControlGroups(
        Path("/sys/fs/cgroup/memory"), "memory",
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
    ),
)  # fmt: skip
#: The groups of this process: ``number:controllers:path`` a line.
OWN_GROUPS = Path("/proc/self/cgroup")


def _left_by_groups() -> list[int]:
    """Bytes that each control group of this process lets it take."""
    left: list[int] = []
    with suppress(OSError, ValueError):
        lines = OWN_GROUPS.read_text(encoding="utf-8").splitlines()
        paths = dict(line.split(":", 2)[1:] for line in lines)
        for groups in CONTROL_GROUPS:
            path = groups.root / paths.get(groups.controller, "").lstrip("/")
            for directory in (path, *path.parents):
                if directory.is_relative_to(groups.root):
                    with suppress(OSError, ValueError, KeyError):  # "max" is no number
                        left.append(_left_by_group(directory, groups))
    return left


def _left_by_group(directory: Path, names: ControlGroups) -> int:
    limit, used = (int((directory / name).read_text()) for name in (names.limit, names.used))
    stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    return max(0, limit - used + int(stat[names.droppable]))
