"""Power cuts: what was not fsynced is lost, kept or torn, in any mixture.

At the cut, everything not synced is uncertain: each directory entry and each page of a file by itself.
A rename may be there in its target and in its source, or in neither; a file may have its new length and
its old bytes. Real file systems lose less.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

_PAGE = 4096
#: Whether the present state survives, of something whose durable state differs.
Survives = Callable[[], bool]


class Disk:
    """Tracks which files and directory entries are durable. At first, all are."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[int, tuple[bytes, int]] = {}
        """Bytes and time of writing by inode."""
        self._listings: dict[int, dict[str, int]] = {}
        """Inodes by name, by inode of the directory."""
        for path in [root, *root.rglob("*")]:
            self.sync(path)

    def sync(self, path: Path) -> None:
        """This file's bytes, or this directory's entries, are durable from now on."""
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            self._listings[status.st_ino] = _listing(path)
        elif stat.S_ISREG(status.st_mode):
            self._files[status.st_ino] = path.read_bytes(), status.st_mtime_ns

    def cut(self, target: Path, survives: Survives) -> None:
        """Write to ``target`` what is found when the power is back."""
        now = {path.lstat().st_ino: path for path in [self._root, *self._root.rglob("*")]}
        self._restore(self._root.lstat().st_ino, now, target, survives)

    def _restore(self, inode: int, now: dict[int, Path], target: Path, survives: Survives) -> None:
        path = now.get(inode)
        if inode in self._listings or (path is not None and path.is_dir()):
            target.mkdir(mode=0o700)
            durable = self._listings.get(inode, {})
            present = {} if path is None else _listing(path)
            for name in sorted(durable.keys() | present.keys()):
                either = (durable.get(name), present.get(name))
                entry = either[0] if either[0] == either[1] else either[survives()]
                if entry is not None:
                    self._restore(entry, now, target / name, survives)
            return
        durable_bytes, written_ns = self._files.get(inode, (b"", 0))
        present_bytes = durable_bytes
        if path is not None:
            present_bytes, written_ns = path.read_bytes(), path.stat().st_mtime_ns
        target.write_bytes(_torn(durable_bytes, present_bytes, survives))
        os.utime(target, ns=(written_ns, written_ns))


def _listing(directory: Path) -> dict[str, int]:
    return {entry.name: entry.inode() for entry in os.scandir(directory)}


def _torn(durable: bytes, present: bytes, survives: Survives) -> bytes:
    """One of the two lengths, and each page from either; zeros after the end of the durable bytes."""
    if durable == present:
        return durable
    length = len(present if survives() else durable)
    pages = []
    for at in range(0, length, _PAGE):
        page = (present if survives() else durable)[at : at + _PAGE]
        pages.append(page.ljust(min(_PAGE, length - at), b"\0")[: length - at])
    return b"".join(pages)


def outcomes(chance: random.Random, mixtures: int) -> Iterator[Survives]:
    """Nothing survives; everything survives; then mixtures."""
    yield lambda: False
    yield lambda: True
    for _ in range(mixtures):
        share = chance.random()
        yield lambda share=share: chance.random() < share  # type: ignore[misc]
