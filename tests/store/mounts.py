"""A directory as if it lay on a disk that cannot be written: a bind mount, seen by one process only."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUSER = 0x20000, 0x10000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18


def _call(function: str, *arguments: object) -> None:
    if getattr(_libc, function)(*arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")


def own_mounts() -> None:
    """Give this process, which has one thread, mounts of its own. Raises ``OSError`` if it may not."""
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _NEWNS)
    except PermissionError:
        _call("unshare", _NEWNS | _NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _call("mount", None, b"/", None, _REC | _PRIVATE, None)


def bind(path: Path) -> None:
    """Make a directory a mount of its own, by way of which it is opened from now on."""
    _call("mount", os.fsencode(path), os.fsencode(path), None, _BIND | _REC, None)


def remount(path: Path, read_only: bool) -> None:
    """Let a mount made by :func:`bind` be written, or no more."""
    flags = _REMOUNT | _BIND | (_RDONLY if read_only else 0)
    _call("mount", None, os.fsencode(path), None, flags, None)
