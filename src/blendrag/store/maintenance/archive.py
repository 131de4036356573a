"""The archive that ``export`` writes and ``import`` reads: a plain tar that any tar can list.

::

    blendrag-store-export.json           first: what this is, and of which version
    pinned/<namespace>/<key>.kv          payloads as they lie in a store; those that are pinned first
    kv/<namespace>/<key>.kv
    complete.json                        last: how many there are, so that a cut is noticed

Owns that form. Headers are made and parsed by :mod:`tarfile`, one block at a time; nothing else of
a tar is understood: links, directories, extended headers and any other name end the reading. Equal
stores make equal archives: no time, user or host is written down.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from blendrag.store.identity import FORMAT_VERSION
from blendrag.store.payload import PIECE_BYTES

FIRST = "blendrag-store-export.json"
LAST = "complete.json"
VERSION = 1
#: What the two JSON members may be at most.
_MAX_JSON_BYTES = 4096
_BLOCK = tarfile.BLOCKSIZE
_PAYLOAD = re.compile(r"(kv|pinned)/([0-9a-f]{64})/([0-9a-f]{64})\.kv", re.ASCII)


class ArchiveFault(Exception):
    """The archive cannot be read any further; says why."""


class Entry(NamedTuple):
    """One payload in an archive."""

    namespace: str
    key: str
    pinned: bool
    size_bytes: int

    @property
    def member(self) -> str:
        return f"{'pinned' if self.pinned else 'kv'}/{self.namespace}/{self.key}.kv"


def open_archive(path: Path) -> BinaryIO:
    """Open to be read. Raises ``OSError`` also for what has no size of its own: a pipe nobody writes
    to would be waited for, and one that somebody does looks cut short."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.ESPIPE, "it is no regular file")
    except BaseException:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


class ArchiveWriter:
    """Writes to a file that can be sought in; the caller owns it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._payloads = self._bytes = 0
        about = {"blendrag_store_export": VERSION, "kv_format": FORMAT_VERSION}
        self._add_json(FIRST, about)

    def add(self, entry: Entry, pieces: Iterable[Any]) -> None:
        """Append a payload, header included; nothing of it where ``pieces`` raises."""
        begin = self._file.tell()
        try:
            self._add(entry.member, entry.size_bytes, pieces)
        except BaseException:
            self._file.seek(begin)
            self._file.truncate()
            raise
        self._payloads += 1
        self._bytes += entry.size_bytes

    def finish(self) -> None:
        """Say that this is all."""
        self._add_json(LAST, {"payloads": self._payloads, "bytes": self._bytes})
        self._file.write(bytes(2 * _BLOCK))

    def _add_json(self, name: str, fields: dict[str, int]) -> None:
        data = json.dumps(fields).encode()
        self._add(name, len(data), [data])

    def _add(self, name: str, size_bytes: int, pieces: Iterable[Any]) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = size_bytes, 0o600
        self._file.write(member.tobuf(tarfile.USTAR_FORMAT))
        for piece in pieces:
            self._file.write(piece)
        self._file.write(bytes(-size_bytes % _BLOCK))


class ArchiveReader:
    """Reads from front to back; raises :class:`ArchiveFault`. The caller owns the file."""

    def __init__(self, file: BinaryIO) -> None:
        """Raises :class:`ArchiveFault` for what is no archive of ours, or from a newer version."""
        self._file = file
        self._left = self._padding = 0
        self.file_bytes = os.fstat(file.fileno()).st_size
        self.position = 0
        self._payloads = self._bytes = 0
        about = self._json(self._header(), FIRST)
        for field, known in (("blendrag_store_export", VERSION), ("kv_format", FORMAT_VERSION)):
            if about.get(field) != known:
                raise ArchiveFault(f"its {field} is {about.get(field)!r}, expected {known}")

    def next(self) -> Entry | None:
        """The next payload, whatever was left of the last one; ``None`` at a good end."""
        self._skip()
        member = self._header()
        match = _PAYLOAD.fullmatch(member.name)
        if match is None:
            count = self._json(member, LAST)
            if count != {"payloads": self._payloads, "bytes": self._bytes}:
                raise ArchiveFault(f"it should hold {count.get('payloads')!r} payloads")
            return None
        if member.size > self.file_bytes - self.position:  # before room is made for it
            raise ArchiveFault("it ends early")
        self._payloads += 1
        self._bytes += member.size
        return Entry(match[2], match[3], match[1] == "pinned", member.size)

    def read(self, size_bytes: int) -> memoryview:
        """Up to ``size_bytes`` of this payload; fewer only where it ends."""
        wanted = min(size_bytes, self._left)
        data = self._exactly(wanted)
        self._left -= wanted
        return memoryview(data)

    def _skip(self) -> None:
        while self._left:
            self.read(PIECE_BYTES)
        self._exactly(self._padding)
        self._padding = 0

    def _header(self) -> tarfile.TarInfo:
        block = self._exactly(_BLOCK)
        try:
            member = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.HeaderError, ValueError) as exc:
            raise ArchiveFault(f"there is no tar header where one should be ({exc})") from exc
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.size < 0:
            raise ArchiveFault(f"{member.name[:160]!r} is not a plain file")
        self._left, self._padding = member.size, -member.size % _BLOCK
        return member

    def _json(self, member: tarfile.TarInfo, name: str) -> dict[str, Any]:
        if member.name != name or member.size > _MAX_JSON_BYTES:
            raise ArchiveFault(f"{member.name[:160]!r} is none of its names")
        try:
            fields = json.loads(bytes(self.read(member.size)))
        except (ValueError, RecursionError) as exc:
            raise ArchiveFault(f"{name} is not what blendrag writes") from exc
        if not isinstance(fields, dict):
            raise ArchiveFault(f"{name} is not what blendrag writes")
        return fields

    def _exactly(self, size_bytes: int) -> bytes:
        try:
            data = self._file.read(size_bytes)
        except OSError as exc:
            raise ArchiveFault(f"it cannot be read ({exc.strerror or exc})") from exc
        self.position += len(data)
        if len(data) < size_bytes:
            raise ArchiveFault("it ends early")
        return data
