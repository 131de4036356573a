"""Make index and files agree after a crash, or fill a new index from the files.

The files are the truth: each contains its own key, and no name is used twice. Only headers of files
that the index does not know are read. Files with names that the store never gives are not touched.

Order of use: a file that the index did not know takes its place before all that were written later,
which keep their order among themselves. So a file that had been evicted, and is back after a power
cut, does not outlive a chunk that was just acknowledged. A wrong clock costs order and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator

from blendrag.errors import CorruptKVError
from blendrag.store.durable import OUT_OF_RESOURCES
from blendrag.store.index import Index, IndexCorrupt
from blendrag.store.payload import open_payload
from blendrag.store.payload_files import Name, PayloadFiles

logger = logging.getLogger("blendrag.store")

#: Attempts to read a header before its file is set aside: a disk may fail for a moment.
_READ_TRIES = 2


def reconcile(files: PayloadFiles, index: Index) -> int:
    """Index every sound file durably, drop rows without a file; returns the number set aside.

    Of two files of one key, written by racing processes, one stays. Runs within a transaction of the
    index, see :meth:`Index.rebuild`. Raises ``OSError`` when it cannot see all files,
    :class:`IndexCorrupt` when the index miscounts.
    """
    quarantined = 0
    shards: set[tuple[str, str]] = set()
    for name in _in_order(files, index):
        known = index.get(*name.entry)
        if known == name:
            index.touch([name.entry])
        elif known is not None and not files.is_gone(known):
            with contextlib.suppress(OSError):
                files.remove(name)
        elif (size_bytes := _sound_size(files, name)) is not None:
            index.add(name, size_bytes)
            shards.add(name.shard)
        elif files.exists(name):
            logger.warning("%s is not a payload of this store: set aside", name.file)
            quarantined += 1
            with contextlib.suppress(OSError):
                files.quarantine(name)
    # A row promises a durable file, and the writer of these may have crashed before the sync.
    for shard in sorted(shards):
        with contextlib.suppress(FileNotFoundError):
            files.sync(shard)
    index.drop([name for name, _ in index.oldest() if files.is_gone(name)])
    entries = total_bytes = 0
    for _, size in index.oldest():
        entries, total_bytes = entries + 1, total_bytes + size
    if index.totals() != (entries, total_bytes):
        raise IndexCorrupt("it miscounts its rows")
    return quarantined


def _in_order(files: PayloadFiles, index: Index) -> Iterator[Name]:
    """Files that the index does not know, oldest first, and rows that have to follow them."""
    unknown = deque(
        sorted(
            (files.size_and_time(name)[1], name) for name in files.walk() if not index.knows(name)
        )
    )
    has_moved = False
    for known, _ in index.oldest() if unknown else ():
        _, written_ns = files.size_and_time(known)
        while unknown and unknown[0][0] <= written_ns:
            yield unknown.popleft()[1]
            has_moved = True
        if has_moved:
            yield known
    for _, name in unknown:
        yield name


def _sound_size(files: PayloadFiles, name: Name) -> int | None:
    """Size of a payload whose header fits its name, otherwise ``None``."""
    for _ in range(_READ_TRIES):
        try:
            with open_payload(files, name) as (header, _):
                return header.file_bytes
        except CorruptKVError:
            continue
        except OSError as exc:
            if exc.errno in OUT_OF_RESOURCES:
                raise
    return None
