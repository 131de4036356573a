"""Take an archive's payloads into a store: each verified before it has a name there, or not at all.

An archive is believed as far as a stranger is: names have to be of the one form there is, each
header has to be the one that its own layout, its name and its size require, and every layer has to
have the header's checksum. That keeps out damage. It cannot keep out a forger, who can sum up other
KV just as well: take archives only from those whose answers you would take.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from blendrag.errors import (
    CorruptKVError,
    InvalidInputError,
    StoreFullError,
    StoreUnavailableError,
)
from blendrag.store.disk_errors import named_errors
from blendrag.store.files import new_name
from blendrag.store.format import MAX_HEADER_BYTES, Description, describe
from blendrag.store.limit import DEFAULT_DISK_BYTES, settle_limit
from blendrag.store.maintenance.archive import ArchiveFault, ArchiveReader, Entry, open_archive
from blendrag.store.maintenance.opening import Opened, changing, require_writable
from blendrag.store.payload import fits, verified_pieces

#: Told how many bytes of the archive are read, and of how many.
Watch = Callable[[int, int], None]


@dataclass
class ImportReport:
    """What became of an archive's payloads."""

    root: str
    archive: str
    imported: int = 0
    imported_bytes: int = 0
    already_there: int = 0
    pinned: int = 0
    """Of both, how many are pinned now, as they were where they come from."""
    rejected: list[str] = field(default_factory=list)
    """Payloads that are not what they say, and why."""
    stopped: str = ""
    """Why the archive was not read to its end; empty if it was."""

    @property
    def is_complete(self) -> bool:
        """Whether everything that the archive was made of is in the store now."""
        return not self.stopped and not self.rejected


def take_in(
    root: Path,
    archive: Path,
    disk_bytes: int | None = None,
    watch: Watch = lambda done, total: None,
) -> ImportReport:
    """Put every payload of ``archive`` that is not there yet; the store is made if there is none.

    Makes room as an ingest does: what was there before may be evicted, what is taken in is not. May
    be cut short at any moment and repeated. ``disk_bytes`` is a limit to remember. Raises
    :class:`InvalidInputError` for what is no archive, then nothing is made or changed;
    :class:`StoreUnavailableError`.
    """
    with _opened(archive) as file:
        try:
            reader = ArchiveReader(file)
        except ArchiveFault as exc:
            raise InvalidInputError(
                f"{archive} is no archive that this blendrag can take in ({exc}), expected a file made "
                "by blendrag store export; make it anew with this version"
            ) from exc
        with named_errors(f"opening store {root}"):
            is_new = not os.path.lexists(root) or (root.is_dir() and not any(root.iterdir()))
        if not is_new:
            require_writable(root)
        limit = partial(settle_limit, root, disk_bytes, DEFAULT_DISK_BYTES, read_only=False)
        report = ImportReport(str(root), str(archive))
        total = reader.file_bytes
        with changing(root, limit) as store, store.pins.scope():
            limit()  # remembered even if nothing is put
            _take_all(store, reader, report, lambda: watch(reader.position, total))
    return report


def _opened(archive: Path) -> BinaryIO:
    try:
        return open_archive(archive)
    except OSError as exc:
        raise InvalidInputError(
            f"{archive} cannot be read ({exc.strerror or exc}), expected a file made by blendrag store "
            "export; name another FILE"
        ) from exc


def _take_all(
    store: Opened, reader: ArchiveReader, report: ImportReport, watch: Callable[[], None]
) -> None:
    """Read to the end, or to where the archive or the disk ends."""
    try:
        while (entry := reader.next()) is not None:
            try:
                _take(store, reader, entry, report)
            except CorruptKVError as exc:
                report.rejected.append(f"{entry.member}: {exc}")
            watch()
    except ArchiveFault as exc:
        report.stopped = f"{report.archive} is not whole: {exc}; what was good until there is kept"
    except StoreFullError as exc:
        report.stopped = str(exc)


def _take(store: Opened, reader: ArchiveReader, entry: Entry, report: ImportReport) -> None:
    """Put one payload unless it is there. Raises :class:`CorruptKVError`; nothing is put then."""
    namespace, key = entry.namespace, entry.key
    there = store.held(partial(store.index.get, namespace, key))
    if there is not None and store.writer.keep(there.name):
        report.already_there += 1
    else:
        header, found = _header(reader, entry)
        pieces = _pieces(header, found, reader)
        if not store.writer.put(new_name(namespace, key), pieces, entry.size_bytes):
            raise StoreUnavailableError(
                f"{entry.member} was removed from store {store.root} while it was taken in, expected "
                "nobody to clear the store meanwhile; repeat the command"
            )
        report.imported += 1
        report.imported_bytes += entry.size_bytes
    store.pins.note_put((namespace, key))
    if entry.pinned:
        store.writer.pin(namespace, key)
        report.pinned += 1


def _header(reader: ArchiveReader, entry: Entry) -> tuple[bytes, Description]:
    """The header of a payload, if it is the one of this entry. Never reads more than one may be."""
    length = bytes(reader.read(8))
    size_bytes = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
    if size_bytes <= MAX_HEADER_BYTES:
        header = length + bytes(reader.read(size_bytes))
        found = describe(header)
        if found is not None and fits(found, entry.namespace, entry.key, entry.size_bytes):
            return header, found
    raise CorruptKVError("its header or size is not what was put")


def _pieces(header: bytes, found: Description, reader: ArchiveReader) -> Iterator[memoryview]:
    yield memoryview(header)
    yield from verified_pieces(found, reader.read)
