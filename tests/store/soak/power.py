"""Power cuts: what was not fsynced when the power went is lost, kept or torn, in any mixture.

A traced child tells when it fsyncs a file or a directory; that much is durable. Everything else at
the moment of the cut is uncertain, each directory entry by itself and each page of a file by
itself: a rename may be there in its target and not gone from its source, or neither, a file may
have its new length and its old bytes. File systems are kinder than that.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

_PAGE = 4096
#: Inode and name of everything in a directory.
Listing = dict[str, int]
#: Of a thing that has a durable and a present state: which one the cut leaves.
Choose = Callable[[], bool]


class Disk:
    """What of a directory is durable. Everything is, when watching begins."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[int, bytes] = {}
        self._written_ns: dict[int, int] = {}
        self._listings: dict[int, Listing] = {}
        for path in [root, *root.rglob("*")]:
            self.sync(path)

    def sync(self, path: Path) -> None:
        """This file's bytes, or this directory's entries, are durable from now on."""
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            self._listings[status.st_ino] = _listing(path)
        elif stat.S_ISREG(status.st_mode):
            self._files[status.st_ino] = path.read_bytes()
            self._written_ns[status.st_ino] = status.st_mtime_ns

    def cut(self, target: Path, survives: Choose) -> None:
        """Write to ``target`` what is found when the power is back."""
        now = {path.lstat().st_ino: path for path in [self._root, *self._root.rglob("*")]}
        self._restore(self._root.lstat().st_ino, now, target, survives)

    def _restore(self, inode: int, now: dict[int, Path], target: Path, survives: Choose) -> None:
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
        durable_bytes = self._files.get(inode)
        present_bytes = durable_bytes if path is None else path.read_bytes()
        target.write_bytes(_torn(durable_bytes or b"", present_bytes or b"", survives))
        written_ns = self._written_ns.get(inode, 0) if path is None else path.stat().st_mtime_ns
        os.utime(target, ns=(written_ns, written_ns))


def _listing(directory: Path) -> Listing:
    return {entry.name: entry.inode() for entry in os.scandir(directory)}


def _torn(durable: bytes, present: bytes, survives: Choose) -> bytes:
    """One length of the two, and each page from either; where the durable one ends, zeros."""
    if durable == present:
        return durable
    length = len(present if survives() else durable)
    pages = []
    for at in range(0, length, _PAGE):
        page = (present if survives() else durable)[at : at + _PAGE]
        pages.append(page.ljust(min(_PAGE, length - at), b"\0")[: length - at])
    return b"".join(pages)


def outcomes(chance: random.Random, mixtures: int) -> Iterator[Choose]:
    """Nothing survives that was not fsynced; all of it; then any mixtures."""
    yield lambda: False
    yield lambda: True
    for _ in range(mixtures):
        share = chance.random()
        yield lambda share=share: chance.random() < share  # type: ignore[misc]
