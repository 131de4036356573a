"""Write what a store holds into one archive, every byte verified on the way.

Carries payloads, and which of them are pinned. Not the limit, which is a matter of the disk; not the
gate's verdicts and calibrations, which another machine has to find for itself; not the corpus.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import BinaryIO

from blendrag.errors import CorruptKVError, InvalidInputError, StoreFullError, is_out_of_space
from blendrag.store.directories import sync_directory
from blendrag.store.disk_errors import named_errors
from blendrag.store.files import Name, PayloadFiles
from blendrag.store.maintenance.archive import (
    ArchiveFault,
    ArchiveReader,
    ArchiveWriter,
    Entry,
    open_archive,
)
from blendrag.store.maintenance.opening import looking, require_namespace
from blendrag.store.payload import header_of, opened, reader, verified_pieces

#: Told how many bytes are written, and of how many.
Watch = Callable[[int, int], None]
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class ExportReport:
    """What went into an archive."""

    archive: str
    payloads: int
    size_bytes: int
    pinned: int
    """Of these, how many are pinned."""
    left_out: tuple[str, ...]
    """Damaged or unreadable payloads, and why."""


def export(
    root: Path,
    archive: Path,
    namespace: str | None = None,
    watch: Watch = lambda done, total: None,
) -> ExportReport:
    """Write all payloads of the store, or of one namespace, to ``archive``, there whole or not at all.

    An archive of an earlier export is replaced, any other file is refused. Changes nothing in the
    store; what is damaged is left out. Raises :class:`InvalidInputError`, :class:`StoreFullError` and
    :class:`StoreUnavailableError`.
    """
    require_namespace(namespace)
    with looking(root) as files:
        _require_ours(root, archive)
        with named_errors(f"listing store {root}"):
            pinned = files.marks.all()
        with _written(archive) as file:
            return _copy(files, namespace, pinned, file, archive, watch)


def _names(files: PayloadFiles, namespace: str | None) -> Iterator[Name]:
    """One payload of each key, in order. Holds the names of one directory at a time."""
    found = files.walk() if namespace is None else files.walk_namespace(namespace)
    with named_errors("listing the store to be exported"):
        for _, together in groupby(found, key=lambda name: (name.namespace, name.key[:2])):
            yield from {name.key: name for name in sorted(together)}.values()


def _copy(
    files: PayloadFiles,
    namespace: str | None,
    pins: set[tuple[str, str]],
    file: BinaryIO,
    archive: Path,
    watch: Watch,
) -> ExportReport:
    """The pinned ones first, as the others are not trusted without."""
    total = sum(files.size(name) for name in _names(files, namespace))
    names = (
        (name, pinned)
        for pinned in (True, False)
        for name in _names(files, namespace)
        if (name.entry in pins) == pinned
    )
    payloads = done = size_bytes = marked = 0
    left_out: list[str] = []
    writer = ArchiveWriter(file)
    for name, pinned in names:
        try:
            size = _add(writer, files, name, pinned)
        except FileNotFoundError:
            continue  # evicted meanwhile
        except (CorruptKVError, PermissionError) as exc:
            left_out.append(f"{name.namespace}/{name.file}: {exc}")
            done += files.size(name)
        else:
            payloads, size_bytes = payloads + 1, size_bytes + size
            marked += pinned
            done += size
        watch(done, max(total, done))
    writer.finish()
    return ExportReport(str(archive), payloads, size_bytes, marked, tuple(left_out))


def _add(writer: ArchiveWriter, files: PayloadFiles, name: Name, pinned: bool) -> int:
    """Append one payload; its bytes. Raises :class:`CorruptKVError`, and then nothing is appended."""
    with opened(files, name) as (fd, found):
        header = header_of(fd, found)
        pieces = verified_pieces(found, reader(fd, found.frame.header_bytes))
        entry = Entry(name.namespace, name.key, pinned, found.file_bytes)
        writer.add(entry, chain([header], pieces))
        return found.file_bytes


def _require_ours(root: Path, archive: Path) -> None:
    """Refuse to replace what is not an archive of ours, or to write into the store itself."""
    if Path(os.path.realpath(archive)).is_relative_to(os.path.realpath(root)):
        raise InvalidInputError(
            f"{archive} lies in store {root}, expected a file elsewhere; choose another FILE"
        )
    try:
        with open_archive(archive) as file:
            ArchiveReader(file)
    except FileNotFoundError:
        return
    except (OSError, ArchiveFault) as exc:
        raise InvalidInputError(
            f"{archive} is there and is no archive of an earlier export, so it is not replaced; "
            "choose another FILE or move it away"
        ) from exc


@contextlib.contextmanager
def _written(archive: Path) -> Iterator[BinaryIO]:
    """A file beside ``archive`` that takes its name, durably, if the block ends well."""
    temporary = archive.with_name(f".{archive.name}.{secrets.token_hex(4)}.part")
    try:
        fd = os.open(temporary, _CREATE, 0o600)
        try:
            with os.fdopen(fd, "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, archive)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        sync_directory(archive.parent)
    except OSError as exc:
        if is_out_of_space(exc):
            raise StoreFullError(
                f"no space left writing {archive}; free some or choose another FILE, the store is as "
                "it was"
            ) from exc
        raise InvalidInputError(
            f"{archive} cannot be written ({exc.strerror or exc}); choose another FILE"
        ) from exc
