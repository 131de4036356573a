"""Files in a store's directories that the store never gave those names: counted, never touched.

Links, FIFOs and directories out of place are foreign, too; nothing is followed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from blendrag.store.directories import DIRECTORY
from blendrag.store.format import is_name

HEX2 = re.compile(r"[0-9a-f]{2}", re.ASCII)
_PAYLOAD = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.kv", re.ASCII)
_PIN = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{64}", re.ASCII)
_TEMPORARY = re.compile(r"[0-9a-f]{16}(\.[0-9a-f]{16}\.part|\.writer)", re.ASCII)
QUARANTINED = re.compile(
    rf"{_PAYLOAD.pattern}|cache\.db(-wal|-shm|-journal)?(\.[0-9a-f]{{16}})?", re.ASCII
)

#: What a name may be; there, or for the way to it.
Rule = Callable[[str], object]


class Foreign(NamedTuple):
    """A file that is none of ours."""

    namespace: str
    """Under whose directory it lies; empty where that is none."""
    path: str
    """Relative to the store."""


def foreign(root: Path) -> Iterator[Foreign]:
    """All of them, below ``kv/``, ``tmp/``, ``pinned/`` and ``quarantine/``.

    A directory out of place counts once, whatever is in it. Raises ``OSError``.
    """
    yield from _below(root, "kv", (is_name, HEX2.fullmatch, _PAYLOAD.fullmatch))
    yield from _below(root, "tmp", (_TEMPORARY.fullmatch,))
    yield from _below(root, "pinned", (_PIN.fullmatch,))
    yield from _below(root, "quarantine", (QUARANTINED.fullmatch,))


def _below(root: Path, path: str, rules: tuple[Rule, ...]) -> Iterator[Foreign]:
    """Directories obey all rules but the last, files the last one."""
    rule, *rest = rules
    for name, mode in _listed(root / path):
        kind = stat.S_ISDIR if rest else stat.S_ISREG
        inner = f"{path}/{name}"
        if not (kind(mode) and rule(name) and _in_its_place(path, name)):
            yield Foreign(_namespace(path), inner)
        elif rest:
            yield from _below(root, inner, tuple(rest))


def _in_its_place(path: str, name: str) -> bool:
    """Whether a payload lies in the directory of its key's first two digits."""
    return path.count("/") < 2 or name.startswith(path[-2:])


def _namespace(path: str) -> str:
    """``kv/<namespace>/…`` → the namespace."""
    return path.split("/")[1] if "/" in path else ""


def _listed(directory: Path) -> list[tuple[str, int]]:
    try:
        fd = os.open(directory, DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        found = []
        for name in os.listdir(fd):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found.append((name, os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode))
        return found
    finally:
        os.close(fd)
