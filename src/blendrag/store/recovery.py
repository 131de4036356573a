"""Make index and files agree after a crash, or fill a new index from the files.

The files are the truth: each contains its own key, and no name is used twice. Only headers of files
that the index does not know are read; layers are verified when they are used. Files with names that
the store never gives are not touched.

Order of use: a file that the index did not know takes its place before all that were written later,
which keep their order among themselves. So a file that had been evicted, and is back after a power
cut, does not outlive a chunk that was just acknowledged. A wrong clock costs order and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator

from blendrag.store.durable import OUT_OF_RESOURCES
from blendrag.store.index import Index, IndexCorrupt, IndexRow
from blendrag.store.payload import read_file_header
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
        row = index.get(*name.entry)
        if row is not None and row.name == name:
            index.touch([name.entry])
        elif row is not None and not files.is_gone(row.name):
            with contextlib.suppress(OSError):
                files.remove(name)
        elif (size_bytes := sound_size(files, name)) is not None:
            index.add(IndexRow(name, size_bytes))
            shards.add(name.shard)
        elif files.exists(name):
            logger.warning("%s is not a payload of this store: set aside", name.file)
            quarantined += 1
            with contextlib.suppress(OSError):
                files.quarantine(name)
    # A row promises a durable file, and the writer of these may have crashed before the sync.
    for shard in sorted(shards):
        with contextlib.suppress(FileNotFoundError):
            files.sync_shard(shard)
    index.drop([row.name for row in index.oldest() if files.is_gone(row.name)])
    entries = size_bytes = 0
    for row in index.oldest():
        entries, size_bytes = entries + 1, size_bytes + row.size_bytes
    if index.totals() != (entries, size_bytes):
        raise IndexCorrupt("it miscounts its rows")
    return quarantined


def _in_order(files: PayloadFiles, index: Index) -> Iterator[Name]:
    """Files that the index does not know, oldest first, and rows that have to move after them."""
    unknown = deque(
        sorted((files.written_ns(name), name) for name in files.walk() if not index.knows(name))
    )
    has_moved = False
    for row in index.oldest() if unknown else ():
        written_ns = files.written_ns(row.name)
        while unknown and unknown[0][0] <= written_ns:
            yield unknown.popleft()[1]
            has_moved = True
        if has_moved:
            yield row.name
    for _, name in unknown:
        yield name


def sound_size(files: PayloadFiles, name: Name) -> int | None:
    """Size of a payload whose header fits its name, otherwise ``None``."""
    for _ in range(_READ_TRIES):
        try:
            fd = files.open(name)
            try:
                header = read_file_header(fd, name)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if exc.errno in OUT_OF_RESOURCES:
                raise
        else:
            return None if header is None else header.file_bytes
    return None
