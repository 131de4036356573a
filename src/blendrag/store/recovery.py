"""Bring index and files together again after a crash, or make the index anew from the files.

The files are the truth: each carries its own key, and its name is never reused. Headers are read
only of files the index does not know. Layers are not read: they are verified whenever they are
used. Nothing that the store's naming did not produce is touched.

Files that the index did not know count as used when they were written, and so do those written later
than the oldest of them: one that had been evicted, and is back after a power cut, must not outlive a
chunk just acknowledged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterator

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


def reconcile(files: PayloadFiles, index: Index) -> int:
    """Index every sound file, drop rows without file; number of files set aside.

    Caller holds the index lock. Of two files of one key, written by racing processes, one stays.
    Raises ``OSError``, and changes no row, when it cannot see all files; :class:`IndexOdd` when the
    index cannot be brought in order. Holds neither all names nor all rows in memory.
    """
    quarantined = 0
    with index.transaction():
        for name in _by_age(files, index):
            row = index.get(name.namespace, name.key)
            if row is not None and row.name == name:
                index.touch([name.entry])
                continue
            if row is not None and not files.is_gone(row.name):
                with contextlib.suppress(OSError):
                    files.remove(name)
                continue
            size_bytes = sound_size(files, name)
            if size_bytes is not None:
                index.add(Row(name, size_bytes))
            elif files.exists(name):
                logger.warning("%s is not a payload of this store: set aside", name.file)
                quarantined += 1
                with contextlib.suppress(OSError):
                    files.quarantine(name)
        index.drop([row.name for row in index.oldest() if files.is_gone(row.name)])
        _require_sums(index)
    return quarantined


def _by_age(files: PayloadFiles, index: Index) -> Iterator[Name]:
    """What the index does not know, and what was written since; the oldest first.

    Sorted by SQLite, on disk where there are many.
    """
    with contextlib.closing(sqlite3.connect("")) as database:
        database.execute("CREATE TABLE file (written_ns, namespace, key, nonce)")

        def keep(names: Iterator[Name], since_ns: int) -> None:
            rows = ((files.written_ns(name), *name) for name in names)
            new = (row for row in rows if row[0] >= since_ns)
            database.executemany("INSERT INTO file VALUES (?, ?, ?, ?)", new)

        keep((name for name in files.walk() if not _knows(index, name)), 0)
        ((oldest_ns,),) = database.execute("SELECT min(written_ns) FROM file")
        if oldest_ns is not None:
            keep((row.name for row in index.oldest() if files.exists(row.name)), oldest_ns)
        for row in database.execute(
            "SELECT namespace, key, nonce FROM file ORDER BY written_ns, key"
        ):
            yield Name(*row)


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
