"""What a store holds, by namespace: counted from the files, which are the truth.

A header is read of one file per namespace and size, as chunks of one layout are of equal size only
if they are of equal length; so a survey costs one ``stat`` per chunk. Verifies nothing.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from blendrag.store.directories import OUT_OF_RESOURCES
from blendrag.store.disk_errors import named_errors
from blendrag.store.files import Name, PayloadFiles
from blendrag.store.format import Description
from blendrag.store.identity import FORMAT_VERSION
from blendrag.store.limit import DEFAULT_DISK_BYTES, settle_limit
from blendrag.store.maintenance.opening import looking
from blendrag.store.payload import described


@dataclass(frozen=True)
class NamespaceStats:
    """What is stored of one model, loaded one way."""

    namespace: str
    dtypes: tuple[str, ...]
    """As the headers say; more than one is none of ours."""
    encodings: tuple[str, ...]
    """How the KV is stored; likewise."""
    chunks: int
    tokens: int
    size_bytes: int
    pinned: int
    """Of these, how many are never evicted."""
    unknown: int
    """Of these, how many have a header that says nothing; ``check`` tells more."""


@dataclass(frozen=True)
class StoreSurvey:
    """A whole store."""

    root: str
    format: int
    limit_bytes: int
    limit_is_remembered: bool
    """Whether somebody gave that limit; else it is the default."""
    chunks: int
    tokens: int
    size_bytes: int
    quarantine_files: int
    quarantine_bytes: int
    temporary_bytes: int
    """Being written, or left by a crash until the store is opened for writing."""
    namespaces: tuple[NamespaceStats, ...]


def survey(root: Path) -> StoreSurvey:
    """Count what the store at ``root`` holds. Raises :class:`StoreUnavailableError`."""
    with looking(root) as files, named_errors(f"listing store {root}"):
        namespaces = _namespaces(files)
        quarantine = _sizes(root / "quarantine")
        remembered = settle_limit(root, None, -1, read_only=False)
        return StoreSurvey(
            root=str(root),
            format=FORMAT_VERSION,
            limit_bytes=DEFAULT_DISK_BYTES if remembered < 0 else remembered,
            limit_is_remembered=remembered >= 0,
            chunks=sum(each.chunks for each in namespaces),
            tokens=sum(each.tokens for each in namespaces),
            size_bytes=sum(each.size_bytes for each in namespaces),
            quarantine_files=len(quarantine),
            quarantine_bytes=sum(quarantine),
            temporary_bytes=sum(_sizes(root / "tmp")),
            namespaces=namespaces,
        )


def _namespaces(files: PayloadFiles) -> tuple[NamespaceStats, ...]:
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    headers: dict[tuple[str, int], Description | None] = {}
    pinned, marks = Counter[str](), files.marks.all()
    for name in files.walk():
        size_bytes = files.size(name)
        if not size_bytes and not files.exists(name):
            continue  # evicted meanwhile
        sizes[name.namespace][size_bytes] += 1
        pinned[name.namespace] += name.entry in marks
        if headers.get((name.namespace, size_bytes)) is None:
            headers[name.namespace, size_bytes] = _header(files, name)
    return tuple(
        _summed(namespace, counts, pinned[namespace], headers)
        for namespace, counts in sorted(sizes.items())
    )


def _summed(
    namespace: str,
    counts: Counter[int],
    pinned: int,
    headers: dict[tuple[str, int], Description | None],
) -> NamespaceStats:
    known = {size: found for size in counts if (found := headers[namespace, size]) is not None}
    return NamespaceStats(
        namespace=namespace,
        dtypes=tuple(sorted({found.layout.dtype for found in known.values()})),
        encodings=tuple(sorted({found.layout.encoding for found in known.values()})),
        chunks=counts.total(),
        tokens=sum(counts[size] * found.tokens for size, found in known.items()),
        size_bytes=sum(size * count for size, count in counts.items()),
        pinned=pinned,
        unknown=sum(count for size, count in counts.items() if size not in known),
    )


def _header(files: PayloadFiles, name: Name) -> Description | None:
    try:
        fd = files.open(name)
    except OSError as exc:
        if exc.errno in OUT_OF_RESOURCES:
            raise
        return None
    try:
        return described(fd, name)
    except OSError:
        return None
    finally:
        os.close(fd)


def _sizes(directory: Path) -> list[int]:
    """Sizes of the files in a directory; nothing where there is none, or it is not ours to see."""
    try:
        with os.scandir(directory) as entries:
            return [entry.stat(follow_symlinks=False).st_size for entry in entries]
    except (FileNotFoundError, PermissionError):
        return []
