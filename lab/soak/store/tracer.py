"""A forked child that is stopped before every system call it makes below one directory (ptrace).

SQLite's calls are seen as well as the store's. Works on Linux for x86-64 only.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.soak.store.children import Child, Teller

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_TRACEME, _POKEUSER, _DETACH, _SYSCALL = 0, 6, 17, 24
_SETOPTIONS, _SYSCALL_INFO = 0x4200, 0x420E
_SYSGOOD, _EXITKILL = 1, 1 << 20
_RAX, _RDX, _ORIG_RAX = 10 * 8, 12 * 8, 15 * 8
_AT_FDCWD = -100
_PAGE = 4096
#: Kind of stop: before a system call, and not after it.
_BEFORE = 1

#: System calls by number: name, and which argument is a descriptor, a path, or a directory and a path.
_CALLS = {
    number: (name, form, place)
    for form, place, calls in (
        ("fd", 0, {0: "read", 1: "write", 5: "fstat", 17: "pread", 18: "pwrite", 20: "writev",
                   72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 77: "ftruncate",
                   91: "fchmod", 138: "fstatfs", 217: "getdents", 285: "fallocate", 295: "preadv",
                   296: "pwritev"}),
        ("fd", 4, {9: "mmap"}),
        ("path", 0, {2: "open", 4: "stat", 6: "lstat", 21: "access", 83: "mkdir", 84: "rmdir",
                     87: "unlink", 90: "chmod", 137: "statfs"}),
        ("path", 1, {82: "rename"}),
        ("directory", 0, {257: "open", 258: "mkdir", 262: "stat", 263: "unlink", 268: "chmod",
                          269: "access", 332: "stat", 439: "access"}),
        ("directory", 2, {264: "rename", 316: "rename"}),
    )
    for number, name in calls.items()
}  # fmt: skip
#: Which argument of an open has the flags.
_OPEN_FLAGS = {2: 1, 257: 2}


@dataclass(frozen=True)
class SystemCall:
    """One system call below the directory."""

    number: int
    """How many came before it."""
    name: str
    path: str
    """Relative to the directory."""
    creates: bool
    """Whether it may create a file: an ``open`` with ``O_CREAT``."""

    def __str__(self) -> str:
        return f"#{self.number} {self.name} {self.path}"


def unavailable() -> str | None:
    """Why nothing can be traced on this machine; ``None`` if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "system calls are traced on Linux for x86-64 only"
    child = os.fork()
    if child == 0:
        os._exit(0 if _libc.ptrace(_TRACEME, 0, None, None) == 0 else 1)
    return None if os.waitpid(child, 0)[1] == 0 else "this machine allows no ptrace"


class Traced:
    """A child that has run ``prepare`` and is stopped before the action that it returned."""

    def __init__(self, root: Path, prepare: Callable[[Teller], Callable[[], None]]) -> None:
        """``prepare`` runs untraced in the child."""
        self._root = str(root.resolve())
        self._calls = 0

        def act(teller: Teller) -> None:
            action = prepare(teller)
            _libc.ptrace(_TRACEME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            action()

        self.child = Child(act)
        self._pid = self.child.pid
        os.waitpid(self._pid, 0)
        self._ptrace(_SETOPTIONS, None, _SYSGOOD | _EXITKILL)

    def calls(self) -> Iterator[SystemCall]:
        """Each call, with the child stopped before it. After the last one the child has ended."""
        while self._next_stop():
            call = self._current()
            if call is not None:
                yield call

    def fail(self, code: int) -> None:
        """Skip the current call, let it return the error ``code``, and stop tracing."""
        self._poke(_ORIG_RAX, -1)
        self._next_stop()
        self._poke(_RAX, -code)
        self._ptrace(_DETACH)

    def shorten(self) -> None:
        """Let the current read or write move half of its bytes, and stop tracing."""
        count = self._info()[4]
        self._poke(_RDX, max(1, count // 2))
        self._next_stop()
        self._poke(_RDX, count)  # the kernel preserves this register, and callers rely on it
        self._ptrace(_DETACH)

    def finish(self) -> int:
        """Let the child complete the current call; its value, or minus the error."""
        self._next_stop()
        (value,) = struct.unpack_from("<q", self._raw_info(), 24)
        return int(value)

    # -- stops -----------------------------------------------------------------------------------

    def _next_stop(self) -> bool:
        """Run to the next stop at a system call; ``False`` when the child has ended."""
        passed_on = 0
        while self.child.pid:
            self._ptrace(_SYSCALL, None, passed_on)
            _, status = os.waitpid(self._pid, 0)
            if not os.WIFSTOPPED(status):
                self.child.pid = 0
            elif os.WSTOPSIG(status) == signal.SIGTRAP | 0x80:
                return True
            else:
                passed_on = os.WSTOPSIG(status)
        return False

    def _raw_info(self) -> bytes:
        buffer = ctypes.create_string_buffer(88)
        self._ptrace(_SYSCALL_INFO, 88, ctypes.addressof(buffer))
        return buffer.raw

    def _info(self) -> tuple[int, ...]:
        """Kind of stop, then number and arguments."""
        info = self._raw_info()
        return (info[0], *struct.unpack_from("<7Q", info, 24))

    def _current(self) -> SystemCall | None:
        kind, number, *arguments = self._info()
        if kind != _BEFORE or number not in _CALLS:
            return None
        name, form, place = _CALLS[number]
        try:
            path = os.path.relpath(self._path(form, arguments, place), self._root)
        except OSError:
            return None
        if path.startswith(".."):
            return None
        creates = number in _OPEN_FLAGS and bool(arguments[_OPEN_FLAGS[number]] & os.O_CREAT)
        self._calls += 1
        name = "unlock" if self._unlocks(name, arguments) else name
        return SystemCall(self._calls - 1, name, path, creates)

    def _unlocks(self, name: str, arguments: list[int]) -> bool:
        if name == "flock":
            return bool(arguments[1] & fcntl.LOCK_UN)
        if name == "fcntl" and arguments[1] in (fcntl.F_SETLK, fcntl.F_SETLKW):
            (kind,) = struct.unpack("<h", self._memory(arguments[2], 2))
            return bool(kind == fcntl.F_UNLCK)
        return False

    def _path(self, form: str, arguments: list[int], place: int) -> str:
        if form == "fd":
            return os.readlink(f"/proc/{self._pid}/fd/{_signed(arguments[place])}")
        if form == "path":
            return os.path.abspath(self._text(arguments[place]))
        directory, text = _signed(arguments[place]), self._text(arguments[place + 1])
        if text.startswith("/") or directory == _AT_FDCWD:
            return os.path.abspath(text)
        return os.path.join(os.readlink(f"/proc/{self._pid}/fd/{directory}"), text).rstrip("/")

    def _text(self, address: int) -> str:
        data = self._memory(address, _PAGE - address % _PAGE)
        if b"\0" not in data:
            data += self._memory(address + len(data), _PAGE)
        return os.fsdecode(data.partition(b"\0")[0])

    def _memory(self, address: int, size: int) -> bytes:
        with open(f"/proc/{self._pid}/mem", "rb", 0) as memory:
            memory.seek(address)
            return memory.read(size)

    def _poke(self, register: int, value: int) -> None:
        self._ptrace(_POKEUSER, register, value & ((1 << 64) - 1))

    def _ptrace(self, request: int, address: int | None = None, data: int | None = None) -> None:
        if _libc.ptrace(request, self._pid, address, data) < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


def _signed(value: int) -> int:
    return ctypes.c_int(value & 0xFFFF_FFFF).value
