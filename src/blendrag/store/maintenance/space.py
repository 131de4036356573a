"""How much space a store takes, and how to free some: ``survey``, ``collect`` (gc) and ``clear``.

Only files that the store wrote are counted or removed. Removal works in small batches, so that other
processes get the index in between.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from blendrag.errors import CorruptKVError
from blendrag.store import writer_files
from blendrag.store.disk_writer import DiskWriter, oldest_first
from blendrag.store.durable import named_errors
from blendrag.store.identity import FORMAT_VERSION, is_learned
from blendrag.store.maintenance import opening
from blendrag.store.maintenance.integrity import QUARANTINED
from blendrag.store.maintenance.opening import Progress, no_progress
from blendrag.store.payload import PayloadHeader, open_payload
from blendrag.store.payload_files import Name, PayloadFiles, opened
from blendrag.store.records import recorded_identity
from blendrag.store.root import DEFAULT_DISK_BYTES, settle_limit

#: Payloads removed per index lock.
BATCH = 64


@dataclass(frozen=True)
class NamespaceStats:
    """What is stored for one model, loaded one way."""

    namespace: str
    dtypes: tuple[str, ...]
    """From the headers. A store writes one dtype per namespace."""
    encodings: tuple[str, ...]
    """From the headers. A store writes one encoding per namespace."""
    chunks: int
    tokens: int
    size_bytes: int
    pinned: int
    """Chunks that are never evicted."""
    unknown: int
    """Chunks whose header cannot be read; ``check`` tells more."""
    model: str | None = None
    """Name of the model; ``None`` if it is not recorded."""
    writer: str | None = None
    """Fingerprint of the writer that encoded them, empty if none did; ``None`` if it is not recorded."""
    encode_after: int | None = None
    """Most similar chunks that each was encoded after; ``None`` if it is not recorded."""


@dataclass(frozen=True)
class WriterStats:
    """A writer that the store keeps."""

    writer: str
    """Its fingerprint."""
    size_bytes: int


@dataclass(frozen=True)
class StoreSurvey:
    root: str
    format: int
    limit_bytes: int
    limit_is_remembered: bool
    """Whether a user set the limit; otherwise it is the default."""
    chunks: int
    tokens: int
    size_bytes: int
    quarantine_files: int
    quarantine_bytes: int
    temporary_bytes: int
    """Being written now, or left by a crash until the store is opened for writing."""
    namespaces: tuple[NamespaceStats, ...]
    writers: tuple[WriterStats, ...]

    def unused_writers(self, corpus_writer: str) -> list[str]:
        """Writers that encoded none of the stored chunks, and that the corpus does not name either.

        None while it is not known which writer encoded some chunks. What was learned from prompts, and
        pinned entries, need no writer.
        """
        needed = {
            each.writer
            for each in self.namespaces
            if each.chunks > each.pinned and not is_learned(each.namespace)
        }
        if None in needed:
            return []
        return [each.writer for each in self.writers if each.writer not in {*needed, corpus_writer}]


@dataclass(frozen=True)
class Removal:
    root: str
    removed: int
    removed_bytes: int
    left: int
    left_bytes: int
    limit_bytes: int
    """The size to reach; 0 for ``clear``."""
    pinned: int
    """Entries left that are never evicted."""
    writers: tuple[str, ...] = ()
    """Writers that nothing needed any more, and that were removed."""


def survey(root: Path) -> StoreSurvey:
    """Count what the store at ``root`` holds. Raises :class:`StoreUnavailableError`.

    Costs one ``stat`` per chunk. Reads one header per namespace and file size, because files of one
    namespace have equal sizes only if they have equal token counts. Verifies nothing.
    """
    with opening.open_for_reading(root) as files, named_errors(f"listing store {root}"):
        namespaces = _survey_namespaces(files, root)
        quarantine = _file_sizes(root / "quarantine")
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
            temporary_bytes=sum(_file_sizes(root / "tmp")),
            namespaces=namespaces,
            writers=tuple(
                WriterStats(each, writer_files.size_bytes(root, each))
                for each in writer_files.kept_in(root)
            ),
        )


def _survey_namespaces(files: PayloadFiles, root: Path) -> tuple[NamespaceStats, ...]:
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    headers: dict[tuple[str, int], PayloadHeader] = {}
    pinned, marks = Counter[str](), files.pinned.all()
    for name in files.walk():
        size_bytes = files.size(name)
        if not size_bytes and not files.exists(name):
            continue  # evicted meanwhile
        sizes[name.namespace][size_bytes] += 1
        pinned[name.namespace] += name.entry in marks
        unreadable = (CorruptKVError, FileNotFoundError, PermissionError)
        if (name.namespace, size_bytes) not in headers:
            with contextlib.suppress(*unreadable), open_payload(files, name) as (header, _):
                headers[name.namespace, size_bytes] = header
    stats = []
    for namespace, counts in sorted(sizes.items()):
        known = {size: headers[namespace, size] for size in counts if (namespace, size) in headers}
        stats.append(
            NamespaceStats(
                namespace=namespace,
                dtypes=tuple(sorted({found.layout.dtype for found in known.values()})),
                encodings=tuple(sorted({found.layout.encoding for found in known.values()})),
                chunks=counts.total(),
                tokens=sum(counts[size] * found.tokens for size, found in known.items()),
                size_bytes=sum(size * count for size, count in counts.items()),
                pinned=pinned[namespace],
                unknown=sum(count for size, count in counts.items() if size not in known),
                **_recorded(root, namespace),
            )
        )
    return tuple(stats)


def _recorded(root: Path, namespace: str) -> dict[str, Any]:
    """What is recorded of the model that computed a namespace's KV, as far as it is valid."""
    found = recorded_identity(root, namespace)
    if found is None:
        return {}
    # earlier versions had no recipes
    fields = {"model": found.get("model_id"), "writer": found.get("writer", "")}
    known: dict[str, Any] = {name: text for name, text in fields.items() if isinstance(text, str)}
    after = found.get("encode_after", 0)
    return known | ({"encode_after": after} if type(after) is int else {})


def _file_sizes(directory: Path) -> list[int]:
    """Sizes of the files in a directory; empty if it is missing or not readable."""
    try:
        with os.scandir(directory) as entries:
            return [entry.stat(follow_symlinks=False).st_size for entry in entries]
    except (FileNotFoundError, PermissionError):
        return []


def collect(root: Path, max_bytes: int | None = None, progress: Progress = no_progress) -> Removal:
    """Evict the least recently used entries until at most ``max_bytes`` are left.

    ``None`` is the limit of the store. The limit itself is not changed. Pinned entries stay, even if
    they take more. Raises :class:`StoreUnavailableError`.
    """
    opening.require_writable(root)
    if max_bytes is None:
        max_bytes = settle_limit(root, None, DEFAULT_DISK_BYTES, read_only=False)
    removed = removed_bytes = 0
    with opening.open_for_changes(root) as store, named_errors(f"evicting from store {root}"):
        goal = max(0, store.with_index(store.index.totals)[1] - max_bytes)
        while sizes := store.with_index(partial(_evict_batch, store, max_bytes)):
            removed += len(sizes)
            removed_bytes += sum(sizes)
            progress(min(removed_bytes, goal), goal)
        left, left_bytes = store.with_index(store.index.totals)
        pinned = sum(bool(store.files.named(*entry)) for entry in store.files.pinned.all())
    return Removal(str(root), removed, removed_bytes, left, left_bytes, max_bytes, pinned)


def _evict_batch(store: DiskWriter, max_bytes: int) -> list[int]:
    """Evict up to :data:`BATCH` entries and return their sizes. Caller holds the index lock."""
    excess_bytes = store.index.totals()[1] - max_bytes
    marks = store.files.pinned.all()
    oldest = oldest_first(store.index, excess_bytes, lambda name: name.entry in marks, BATCH)
    store.remove(list(oldest))
    return list(oldest.values())


def clear(root: Path, namespace: str | None = None, progress: Progress = no_progress) -> Removal:
    """Remove every payload of ``namespace`` or of all namespaces, pinned ones included.

    Also empties the quarantine when all namespaces are cleared. The limit, the corpus, calibrations
    and foreign files stay. Pinned entries go last, because the other chunks are not trusted without
    them. Raises :class:`StoreUnavailableError`, and :class:`InvalidInputError` for a bad namespace.
    """
    opening.require_writable(root)
    removed = removed_bytes = 0
    with opening.open_for_changes(root) as store, named_errors(f"clearing store {root}"):
        total_bytes = sum(map(store.files.size, store.files.walk(namespace)))
        for batch in _batches(store.files, namespace):
            size_bytes = sum(map(store.files.size, batch))
            store.remove(batch)
            removed, removed_bytes = removed + len(batch), removed_bytes + size_bytes
            progress(removed_bytes, max(total_bytes, removed_bytes))
        for entry in store.files.pinned.all():
            if namespace in (None, entry[0]):
                store.delete(*entry)
        if namespace is None:
            _empty_quarantine(root)
        store.recover()
        left, left_bytes = store.with_index(store.index.totals)
        pinned = len(store.files.pinned.all())
    return Removal(str(root), removed, removed_bytes, left, left_bytes, 0, pinned)


def _batches(files: PayloadFiles, namespace: str | None) -> Iterator[list[Name]]:
    """All payloads in batches, the pinned ones last."""
    marks = files.pinned.all()
    for pinned in (False, True):
        names = (name for name in files.walk(namespace) if (name.entry in marks) == pinned)
        while batch := list(islice(names, BATCH)):
            yield batch


def _empty_quarantine(root: Path) -> None:
    with opened(root / "quarantine") as directory:
        for file in filter(QUARANTINED.fullmatch, os.listdir(directory)):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(file, dir_fd=directory)
