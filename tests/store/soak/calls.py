"""The system calls of x86-64 that touch files, and where each says which file it means."""

from __future__ import annotations

#: Number, and what says which file is meant: ``f`` a descriptor, ``p`` a path, ``d`` a directory and
#: a path, at these places among the arguments.
CALLS: dict[int, tuple[str, str, int]] = {
    0: ("read", "f", 0),
    1: ("write", "f", 0),
    2: ("open", "p", 0),
    4: ("stat", "p", 0),
    5: ("fstat", "f", 0),
    6: ("lstat", "p", 0),
    9: ("mmap", "f", 4),
    17: ("pread", "f", 0),
    18: ("pwrite", "f", 0),
    20: ("writev", "f", 0),
    21: ("access", "p", 0),
    72: ("fcntl", "f", 0),
    73: ("flock", "f", 0),
    74: ("fsync", "f", 0),
    75: ("fdatasync", "f", 0),
    77: ("ftruncate", "f", 0),
    82: ("rename", "p", 1),
    83: ("mkdir", "p", 0),
    84: ("rmdir", "p", 0),
    87: ("unlink", "p", 0),
    90: ("chmod", "p", 0),
    91: ("fchmod", "f", 0),
    137: ("statfs", "p", 0),
    138: ("fstatfs", "f", 0),
    217: ("getdents", "f", 0),
    257: ("open", "d", 0),
    258: ("mkdir", "d", 0),
    262: ("stat", "d", 0),
    263: ("unlink", "d", 0),
    264: ("rename", "d", 2),
    268: ("chmod", "d", 0),
    269: ("access", "d", 0),
    285: ("fallocate", "f", 0),
    295: ("preadv", "f", 0),
    296: ("pwritev", "f", 0),
    316: ("rename", "d", 2),
    332: ("stat", "d", 0),
    439: ("access", "d", 0),
}
OPEN_FLAGS_AT = {2: 1, 257: 2}
