"""Make room in a store, or empty it: what the store wrote goes, nothing else does.

Owns what may go and in which order. Works in batches, each of them whole or made good by whoever
opens the store next, so it can be interrupted at any moment and others get their turn in between.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from blendrag.store.directories import DIRECTORY
from blendrag.store.disk_errors import named_errors
from blendrag.store.files import Name
from blendrag.store.limit import DEFAULT_DISK_BYTES, settle_limit
from blendrag.store.maintenance.foreign import QUARANTINED
from blendrag.store.maintenance.opening import (
    Opened,
    changing,
    require_namespace,
    require_writable,
)
from blendrag.store.room import oldest_first

#: Told how many bytes are gone, and of how many.
Watch = Callable[[int, int], None]

#: Payloads removed while the index is held.
BATCH = 64


@dataclass(frozen=True)
class Removal:
    """What is gone, and what is left."""

    root: str
    removed: int
    removed_bytes: int
    left: int
    left_bytes: int
    limit_bytes: int
    """What was to be reached; 0 for a store, or a namespace of it, that was cleared."""
    pinned: int
    """Of those left, how many are never evicted."""


def collect(
    root: Path, max_bytes: int | None = None, watch: Watch = lambda done, total: None
) -> Removal:
    """Evict the least recently used until at most ``max_bytes`` are left; ``None``: the store's limit.

    Pinned entries stay, even if that is more. Clears what crashed writers left, too. The store's own
    limit stays what it is. Raises :class:`StoreUnavailableError`.
    """
    require_writable(root)
    if max_bytes is None:
        max_bytes = settle_limit(root, None, DEFAULT_DISK_BYTES, read_only=False)
    removed = removed_bytes = 0
    with changing(root) as store, named_errors(f"evicting from store {root}"):
        goal = max(0, store.held(store.index.totals)[1] - max_bytes)
        while sizes := store.held(partial(_evict_batch, store, max_bytes)):
            removed += len(sizes)
            removed_bytes += sum(sizes)
            watch(min(removed_bytes, goal), goal)
        entries, size_bytes = store.held(store.index.totals)
        pinned = store.files.marks.all()
        left_pinned = sum(1 for namespace, key in pinned if store.files.named(namespace, key))
    return Removal(str(root), removed, removed_bytes, entries, size_bytes, max_bytes, left_pinned)


def _evict_batch(store: Opened, max_bytes: int) -> list[int]:
    """Drop up to :data:`BATCH` of the oldest that may go; their sizes. Caller holds the index lock."""
    excess = store.index.totals()[1] - max_bytes
    marked = store.files.marks.all()
    stays: Callable[[Name], bool] = lambda name: name.entry in marked  # noqa: E731
    victims = oldest_first(store.index, excess, stays, at_most=BATCH).victims
    if victims:
        store.writer.remove([row.name for row in victims])
    return [row.size_bytes for row in victims]


def clear(
    root: Path, namespace: str | None = None, watch: Watch = lambda done, total: None
) -> Removal:
    """Remove every payload, pinned ones too, of ``namespace`` or of all; index and quarantine follow.

    The store stays a store: its format and limit are kept, and so are the corpus beside it, what
    ``verify`` and ``calibrate`` remember, and every file that the store did not write. Pinned entries
    go last: chunks without the one they are checked by would not be trusted. Raises
    :class:`StoreUnavailableError`, and :class:`InvalidInputError` for what is no namespace.
    """
    require_namespace(namespace)
    require_writable(root)
    removed = removed_bytes = 0
    with changing(root) as store, named_errors(f"clearing store {root}"):
        total = sum(store.files.size(name) for name in _names(store, namespace))
        for batch in _batches(store, namespace):
            size_bytes = sum(store.files.size(name) for name in batch)
            store.writer.remove(batch)
            removed, removed_bytes = removed + len(batch), removed_bytes + size_bytes
            watch(removed_bytes, max(total, removed_bytes))
        for entry in store.files.marks.all():
            if namespace in (None, entry[0]):
                store.writer.delete(*entry)
        if namespace is None:
            _empty_quarantine(root)
        store.writer.remove_empty_directories(namespace)
        store.writer.recover()
        entries, size_bytes = store.held(store.index.totals)
        left_pinned = len(store.files.marks.all())
    return Removal(str(root), removed, removed_bytes, entries, size_bytes, 0, left_pinned)


def _names(store: Opened, namespace: str | None) -> Iterator[Name]:
    return store.files.walk() if namespace is None else store.files.walk_namespace(namespace)


def _batches(store: Opened, namespace: str | None) -> Iterator[list[Name]]:
    """All payloads, those that are pinned in the last batches."""
    pinned = store.files.marks.all()
    for is_last in (False, True):
        names = (name for name in _names(store, namespace) if (name.entry in pinned) == is_last)
        while batch := list(islice(names, BATCH)):
            yield batch


def _empty_quarantine(root: Path) -> None:
    """Of what was set aside; anything else somebody put there stays."""
    directory = os.open(root / "quarantine", DIRECTORY)
    try:
        for file in filter(QUARANTINED.fullmatch, os.listdir(directory)):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(file, dir_fd=directory)
    finally:
        os.close(directory)
