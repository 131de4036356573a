"""Bring index and files together again after a crash, or make the index anew from the files.

The files are the truth: each carries its own key, and its name is never reused. Headers are read
only of files the index does not know. Layers are not read: they are verified whenever they are
used. Nothing that the store's naming did not produce is touched.

Files that the index did not know go before all that were written later, and these keep the order in
which they were used: one that had been evicted, and is back after a power cut, must not outlive a
chunk just acknowledged. A clock that was wrong costs order, nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from blendrag.store.directories import OUT_OF_RESOURCES
from blendrag.store.files import Name, PayloadFiles
from blendrag.store.index import Index
from blendrag.store.index_errors import IndexOdd
from blendrag.store.payload import described
from blendrag.store.rows import Row

logger = logging.getLogger("blendrag.store")

#: How often a header is read before its file counts as one that cannot be: a disk, or a network in
#: front of it, may fail for a moment, and what is set aside is lost.
_TRIES = 2
#: SQLite knows no larger number; file systems do, and anybody may date a file as he likes.
_LAST_NS = (1 << 63) - 1


def reconcile(files: PayloadFiles, index: Index) -> int:
    """Index every sound file, durably there by then; drop rows without file; number of files set aside.

    Caller holds the index lock. Of two files of one key, written by racing processes, one stays.
    Raises ``OSError``, and changes no row, when it cannot see all files; :class:`IndexOdd` when the
    index cannot be brought in order. Holds neither all names nor all rows in memory.
    """
    quarantined = 0
    shards: set[tuple[str, str]] = set()
    with index.transaction():
        for name in _in_order(files, index):
            row = index.get(*name.entry)
            if row is not None and row.name == name:
                index.touch([name.entry])
            elif row is not None and not files.is_gone(row.name):
                with contextlib.suppress(OSError):
                    files.remove(name)
            elif (size_bytes := sound_size(files, name)) is not None:
                index.add(Row(name, size_bytes))
                shards.add(name.shard)
            elif files.exists(name):
                logger.warning("%s is not a payload of this store: set aside", name.file)
                quarantined += 1
                with contextlib.suppress(OSError):
                    files.quarantine(name)
        # Whoever wrote them may not have got to that, and a row is believed to be of what stays.
        for shard in sorted(shards):
            with contextlib.suppress(FileNotFoundError):
                files.sync_shard(shard)
        index.drop([row.name for row in index.oldest() if files.is_gone(row.name)])
        _require_sums(index)
    return quarantined


def _in_order(files: PayloadFiles, index: Index) -> Iterator[Name]:
    """What the index does not know, the oldest first, and all that then has to move behind it.

    Sorted by SQLite, on disk where there are many. The index may be changed meanwhile: rows that are
    added or moved to its end are not looked at again.
    """
    with _scratch(files.temporary()) as database:
        database.execute(
            "CREATE TABLE file (written_ns, key, nonce, namespace, "
            "PRIMARY KEY (written_ns, key, nonce, namespace)) WITHOUT ROWID"
        )
        unknown = (name for name in files.walk() if not _knows(index, name))
        rows = ((_written_ns(files, name), *name) for name in unknown)
        database.executemany(
            "INSERT INTO file (written_ns, namespace, key, nonce) VALUES (?, ?, ?, ?)", rows
        )
        found = database.execute(
            "SELECT written_ns, namespace, key, nonce FROM file ORDER BY written_ns, key, nonce, namespace"
        )
        first = next(found, None)
        has_moved = False
        for row in index.oldest() if first is not None else ():
            while first is not None and first[0] <= _written_ns(files, row.name):
                yield Name(*first[1:])
                first, has_moved = next(found, None), True
            if has_moved:
                yield row.name
        while first is not None:
            yield Name(*first[1:])
            first = next(found, None)


@contextlib.contextmanager
def _scratch(path: Path) -> Iterator[sqlite3.Connection]:
    """A database for as long as the block lasts, at ``path`` once it is too large for memory.

    Not one of SQLite's own: there may be no room for it, nor a directory that can be written, where the
    system has its temporary files. For the same reason nothing is to be sorted but by an index.
    """
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        try:
            database.execute("PRAGMA journal_mode = OFF")
            database.execute("PRAGMA synchronous = OFF")
            database.execute("BEGIN")  # never ended: nothing is written that fits into memory
            yield database
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _written_ns(files: PayloadFiles, name: Name) -> int:
    return max(-_LAST_NS, min(files.written_ns(name), _LAST_NS))


def _knows(index: Index, name: Name) -> bool:
    row = index.get(name.namespace, name.key)
    return row is not None and row.name == name


def _require_sums(index: Index) -> None:
    entries = size_bytes = 0
    for row in index.oldest():
        entries, size_bytes = entries + 1, size_bytes + row.size_bytes
    if index.totals() != (entries, size_bytes):
        raise IndexOdd("the index miscounts its rows")


def sound_size(files: PayloadFiles, name: Name) -> int | None:
    """Size of a payload whose header is what it must be for its name, otherwise ``None``."""
    for _ in range(_TRIES):
        try:
            fd = files.open(name)
            try:
                found = described(fd, name)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if exc.errno in OUT_OF_RESOURCES:
                raise
        else:
            return None if found is None else found.file_bytes
    return None
