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
from blendrag.store.files import FILE_NAME, PREFIX
from blendrag.store.format import is_name
from blendrag.store.index_check import DATABASE_FILES, JOURNAL
from blendrag.store.marks import MARK
from blendrag.store.writers import MARKER, PART

#: Of what was set aside: payloads, and all that SQLite keeps, by their own names or beside others.
QUARANTINED = re.compile(
    rf"{FILE_NAME.pattern}|({'|'.join(map(re.escape, (*DATABASE_FILES, JOURNAL)))})(\.[0-9a-f]{{16}})?",
    re.ASCII,
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
    yield from _below(root, "kv", (is_name, PREFIX.fullmatch, FILE_NAME.fullmatch))
    yield from _below(root, "tmp", (lambda name: MARKER.fullmatch(name) or PART.fullmatch(name),))
    yield from _below(root, "pinned", (MARK.fullmatch,))
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
