"""Export a store to an archive, and import an archive: a plain tar that any tar can list.

::

    blendrag-store-export.json           first: versions of the archive and of the KV format
    pinned/<namespace>/<key>.kv          payloads as in the store, the pinned ones first
    kv/<namespace>/<key>.kv
    writers/<fingerprint>.safetensors
    complete.json                        last: counts, so that a cut archive is noticed

Limit, calibrations and corpus are not exported. Equal stores give equal bytes: no time, user or host
is written. An import accepts exactly these names as plain files, and verifies header and layers of
every payload, and the fingerprint of every writer. Checksums do not stop a forger: import archives only
from trusted sources.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from blendrag.errors import (
    CorruptKVError,
    InvalidInputError,
    StoreFullError,
    StoreUnavailableError,
    is_out_of_space,
)
from blendrag.store import writer_files
from blendrag.store.disk_writer import DiskWriter
from blendrag.store.durable import named_errors, sync_directory, whole_file
from blendrag.store.identity import FORMAT_VERSION, is_learned
from blendrag.store.maintenance import opening
from blendrag.store.maintenance.opening import Progress, no_progress
from blendrag.store.payload import PIECE_BYTES, open_payload, read_header, verified_pieces
from blendrag.store.payload_files import Name, PayloadFiles, new_name
from blendrag.store.regular_files import open_regular
from blendrag.store.root import DEFAULT_DISK_BYTES, settle_limit

FIRST = "blendrag-store-export.json"
LAST = "complete.json"
_VERSIONS = {"blendrag_store_export": 1, "kv_format": FORMAT_VERSION}
_MAX_JSON_BYTES = 4096
_BLOCK = tarfile.BLOCKSIZE
_DAMAGED_WRITER = (
    "the writer is damaged, expected the one of this fingerprint; ingest with its directory (--writer), then "
    "export again"
)
_WRITER = re.compile(rf"{writer_files.DIRECTORY}/([0-9a-f]{{64}})\.safetensors", re.ASCII)
_PAYLOAD = re.compile(r"(kv|pinned)/([0-9a-f]{64})/([0-9a-f]{64})\.kv", re.ASCII)


@dataclass
class ExportReport:
    archive: str
    payloads: int = 0
    size_bytes: int = 0
    pinned: int = 0
    """Pinned payloads among them."""
    writers: int = 0
    """Writers, which encoded some of the KV."""
    left_out: list[str] = field(default_factory=list)
    """Damaged or unreadable payloads and writers, and why."""


@dataclass
class ImportReport:
    root: str
    archive: str
    imported: int = 0
    imported_bytes: int = 0
    already_there: int = 0
    pinned: int = 0
    """Pinned payloads, imported or already there."""
    writers: int = 0
    """Writers, imported or already there."""
    rejected: list[str] = field(default_factory=list)
    """Payloads and writers that failed verification, and why."""
    stopped: str = ""
    """Why the archive was not read to its end; empty if it was."""

    @property
    def is_complete(self) -> bool:
        """Whether every payload and writer of the archive is in the store now."""
        return not self.stopped and not self.rejected


def export_archive(
    root: Path, archive: Path, namespace: str | None = None, progress: Progress = no_progress
) -> ExportReport:
    """Write all verified payloads of the store, or of one namespace, to ``archive``.

    What was learned from prompts is private, and only exported by its namespace.
    The archive appears whole or not at all. An archive of an earlier export is replaced, any other
    file is refused. Damaged payloads and writers are left out. Raises :class:`InvalidInputError`,
    :class:`StoreFullError` and :class:`StoreUnavailableError`.
    """
    with opening.open_for_reading(root) as files:
        _require_replaceable(root, archive)
        report = ExportReport(str(archive))
        with _whole_archive(archive) as file:
            _copy(root, files, namespace, file, report, progress)
    return report


def _copy(
    root: Path,
    files: PayloadFiles,
    namespace: str | None,
    file: BinaryIO,
    report: ExportReport,
    progress: Progress,
) -> None:
    """Pinned payloads go first, because the others are not trusted without them."""
    with named_errors("listing the store to be exported"):
        marks = files.pinned.all()
    total_bytes = sum(map(files.size, _one_per_key(files, namespace)))
    done_bytes = 0
    _write_json(file, FIRST, _VERSIONS)
    for pinned in (True, False):
        for name in _one_per_key(files, namespace):
            if (name.entry in marks) != pinned:
                continue
            try:
                size_bytes = _add(file, files, name, pinned)
            except FileNotFoundError:
                continue  # evicted meanwhile
            except (CorruptKVError, PermissionError) as exc:
                report.left_out.append(f"{name.namespace}/{name.file}: {exc}")
                size_bytes = files.size(name)
            else:
                report.payloads += 1
                report.size_bytes += size_bytes
                report.pinned += pinned
            done_bytes += size_bytes
            progress(done_bytes, max(total_bytes, done_bytes))
    for fingerprint in writer_files.kept_in(root):
        _add_writer(file, root, fingerprint, report)
    _write_json(file, LAST, {"payloads": report.payloads, "bytes": report.size_bytes})
    file.write(bytes(2 * _BLOCK))


def _one_per_key(files: PayloadFiles, namespace: str | None) -> Iterator[Name]:
    """One payload of each key, in order. Holds the names of one directory at a time."""
    with named_errors("listing the store to be exported"):
        found = (n for n in files.walk(namespace) if namespace or not is_learned(n.namespace))
        for _, names in groupby(found, key=lambda name: name.entry):
            yield from islice(names, 1)


def _add(file: BinaryIO, files: PayloadFiles, name: Name, pinned: bool) -> int:
    """Append one payload; returns its bytes."""
    with open_payload(files, name) as (header, read):
        entry = ArchivedPayload(name.namespace, name.key, pinned, header.file_bytes)
        pieces = chain([header.encoded], verified_pieces(header, read))
        _write_member(file, entry.member, entry.size_bytes, pieces)
        return entry.size_bytes


def _add_writer(file: BinaryIO, root: Path, fingerprint: str, report: ExportReport) -> None:
    member = writer_files.member_of(fingerprint)
    try:
        data = writer_files.read(root, fingerprint)
    except FileNotFoundError:
        return  # no longer needed, and removed meanwhile
    except OSError as exc:
        report.left_out.append(f"{member}: {exc.strerror or exc}")
        return
    if writer_files.is_whole(data, fingerprint):
        _write_member(file, member, len(data), [data])
        report.writers += 1
    else:
        report.left_out.append(f"{member}: {_DAMAGED_WRITER}")


def _require_replaceable(root: Path, archive: Path) -> None:
    """Refuse a path inside the store, and an existing file that is not an archive."""
    if Path(os.path.realpath(archive)).is_relative_to(os.path.realpath(root)):
        raise InvalidInputError(
            f"{archive} is inside store {root}, expected a file elsewhere; choose another FILE"
        )
    try:
        ArchiveReader(archive).close()
    except FileNotFoundError:
        return
    except (OSError, ArchiveFault) as exc:
        raise InvalidInputError(
            f"{archive} exists and is not an archive of an earlier export, so it is not replaced; "
            "choose another FILE or move it away"
        ) from exc


@contextlib.contextmanager
def _whole_archive(archive: Path) -> Iterator[BinaryIO]:
    """A temporary file that is renamed to ``archive``, durably, if the block succeeds."""
    temporary = archive.with_name(f".{archive.name}.{secrets.token_hex(4)}.part")
    try:
        with whole_file(temporary, archive) as fd, os.fdopen(fd, "w+b", closefd=False) as file:
            yield file
        sync_directory(archive.parent)
    except OSError as exc:
        if is_out_of_space(exc):
            raise StoreFullError(
                f"no space left to write {archive}; free some space or choose another FILE "
                "(the store is unchanged)"
            ) from exc
        raise InvalidInputError(
            f"{archive} cannot be written ({exc.strerror or exc}); choose another FILE"
        ) from exc


def import_archive(
    root: Path, archive: Path, disk_bytes: int | None = None, progress: Progress = no_progress
) -> ImportReport:
    """Put every payload of ``archive`` that the store lacks; creates the store if there is none.

    Makes room like an ingest: older entries may be evicted, imported ones are not. An interrupted
    import can be repeated. ``disk_bytes`` is remembered as the limit of the store. Raises
    :class:`InvalidInputError` for a file that is not an archive, before anything is created or
    changed, and :class:`StoreUnavailableError`.
    """
    try:
        source = ArchiveReader(archive)
    except OSError as exc:
        raise InvalidInputError(
            f"{archive} cannot be read ({exc.strerror or exc}), expected a file made by blendrag store "
            "export; choose another FILE"
        ) from exc
    except ArchiveFault as exc:
        raise InvalidInputError(
            f"{archive} is not an archive that this version can import ({exc}), expected a file "
            "made by blendrag store export; export it again with this version"
        ) from exc
    with contextlib.closing(source):
        with named_errors(f"opening store {root}"):
            is_new = not os.path.lexists(root) or (root.is_dir() and not any(root.iterdir()))
        if not is_new:
            opening.require_writable(root)
        limit = partial(settle_limit, root, disk_bytes, DEFAULT_DISK_BYTES, read_only=False)
        report = ImportReport(str(root), str(archive))
        with opening.open_for_changes(root, limit) as store, store.pins.scope():
            limit()  # remember it even if nothing is put
            _take_all(store, source, report, progress)
    return report


def _take_all(
    store: DiskWriter, source: ArchiveReader, report: ImportReport, progress: Progress
) -> None:
    """Import payloads until the archive or the disk space ends."""
    try:
        while (entry := source.next()) is not None:
            if isinstance(entry, str):
                _take_writer(store.root, source, entry, report)
                continue
            try:
                _take(store, source, entry, report)
            except CorruptKVError as exc:
                report.rejected.append(f"{entry.member}: {exc}")
            progress(source.position, source.file_bytes)
    except ArchiveFault as exc:
        report.stopped = f"{report.archive} is incomplete: {exc}; the payloads before that are kept"
    except StoreFullError as exc:
        report.stopped = str(exc)


def _take(
    store: DiskWriter, source: ArchiveReader, entry: ArchivedPayload, report: ImportReport
) -> None:
    """Import one payload unless the store has it. Raises :class:`CorruptKVError` and puts nothing."""
    namespace, key = entry.namespace, entry.key
    name = store.with_index(partial(store.index.get, namespace, key))
    if name is not None and store.keep(name):
        report.already_there += 1
    else:
        header = read_header(source.read, namespace, key, entry.size_bytes)
        pieces = chain([header.encoded], verified_pieces(header, source.read))
        if not store.put(new_name(namespace, key), pieces, entry.size_bytes):
            raise StoreUnavailableError(
                f"{entry.member} was removed from store {store.root} during the import, expected "
                "no clear meanwhile; repeat the command"
            )
        report.imported += 1
        report.imported_bytes += entry.size_bytes
    store.pins.note_put((namespace, key))
    if entry.pinned:
        store.pin(namespace, key)
        report.pinned += 1


def _take_writer(root: Path, source: ArchiveReader, fingerprint: str, report: ImportReport) -> None:
    """Import a writer unless the store has an undamaged copy."""
    if not writer_files.has_whole(root, fingerprint):
        data = b"".join(iter(partial(source.read, PIECE_BYTES), b""))
        if not writer_files.is_whole(data, fingerprint):
            report.rejected.append(f"{writer_files.member_of(fingerprint)}: {_DAMAGED_WRITER}")
            return
        writer_files.write(root, fingerprint, data)
    report.writers += 1


# -- the archive file --------------------------------------------------------------------------------


class ArchiveFault(Exception):
    """The archive cannot be read any further, and why."""


class ArchivedPayload(NamedTuple):
    namespace: str
    key: str
    pinned: bool
    size_bytes: int

    @property
    def member(self) -> str:
        return f"{'pinned' if self.pinned else 'kv'}/{self.namespace}/{self.key}.kv"


def _write_member(file: BinaryIO, name: str, size_bytes: int, pieces: Iterable[bytes]) -> None:
    """Append a file to the tar. Appends nothing if ``pieces`` raises."""
    begin = file.tell()
    member = tarfile.TarInfo(name)
    member.size, member.mode = size_bytes, 0o600
    try:
        file.write(member.tobuf(tarfile.USTAR_FORMAT))
        for piece in pieces:
            file.write(piece)
        file.write(bytes(-size_bytes % _BLOCK))
    except BaseException:
        file.seek(begin)
        file.truncate()
        raise


def _write_json(file: BinaryIO, name: str, fields: dict[str, int]) -> None:
    data = json.dumps(fields).encode()
    _write_member(file, name, len(data), [data])


class ArchiveReader:
    """Reads an archive from front to back. Raises :class:`ArchiveFault`."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`ArchiveFault` for other files and for archives of another version.

        Raises ``OSError`` also for a FIFO or device, and never waits for one.
        """
        self._file = os.fdopen(open_regular(path, follow=True), "rb")
        self.close = self._file.close
        self._left = self._padding = 0
        self.file_bytes = os.fstat(self._file.fileno()).st_size
        self.position = 0
        self._payloads = self._bytes = 0
        try:
            versions = self._json(self._header(), FIRST)
            for name, known in _VERSIONS.items():
                if versions.get(name) != known:
                    raise ArchiveFault(f"its {name} is {versions.get(name)!r}, expected {known}")
        except BaseException:
            self.close()
            raise

    def next(self) -> ArchivedPayload | str | None:
        """The next payload, or the fingerprint of a writer, skipping the rest of the last one; ``None`` at
        the end."""
        while self._left:
            self.read(PIECE_BYTES)
        self._read_exactly(self._padding)
        self._padding = 0
        member = self._header()
        match = _PAYLOAD.fullmatch(member.name)
        writer = _WRITER.fullmatch(member.name)
        if (match or writer) and member.size > self.file_bytes - self.position:
            raise ArchiveFault("it ends early")  # before room is made for it
        if writer is not None:
            if member.size > writer_files.MAX_MIB << 20:
                raise ArchiveFault(f"it holds a writer of more than {writer_files.MAX_MIB} MiB")
            return writer[1]
        if match is None:
            count = self._json(member, LAST)
            if count != {"payloads": self._payloads, "bytes": self._bytes}:
                raise ArchiveFault(f"it should hold {count.get('payloads')!r} payloads")
            return None
        self._payloads += 1
        self._bytes += member.size
        return ArchivedPayload(match[2], match[3], match[1] == "pinned", member.size)

    def read(self, size_bytes: int) -> bytes:
        """Up to ``size_bytes`` of the current payload; fewer only at its end."""
        data = self._read_exactly(min(size_bytes, self._left))
        self._left -= len(data)
        return data

    def _header(self) -> tarfile.TarInfo:
        block = self._read_exactly(_BLOCK)
        try:
            member = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.HeaderError, ValueError) as exc:
            raise ArchiveFault(f"expected a tar header ({exc})") from exc
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.size < 0:
            raise ArchiveFault(f"{member.name[:160]!r} is not a plain file")
        self._left, self._padding = member.size, -member.size % _BLOCK
        return member

    def _json(self, member: tarfile.TarInfo, name: str) -> dict[str, Any]:
        if member.name != name or member.size > _MAX_JSON_BYTES:
            raise ArchiveFault(f"{member.name[:160]!r} is not a name of an archive")
        data = self.read(member.size)
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(data)
            if isinstance(fields, dict):
                return fields
        raise ArchiveFault(f"{name} is not what blendrag writes")

    def _read_exactly(self, size_bytes: int) -> bytes:
        try:
            data = self._file.read(size_bytes)
        except OSError as exc:
            raise ArchiveFault(f"it cannot be read ({exc.strerror or exc})") from exc
        self.position += len(data)
        if len(data) < size_bytes:
            raise ArchiveFault("it ends early")
        return data
