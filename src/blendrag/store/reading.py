"""How a payload is found and opened, and the rule that any doubt about it is a miss.

Owns what is in doubt: set aside, counted, warned about, and not believed again. Changes a store's
directory by way of its writer only, if at all.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from functools import partial

from blendrag.errors import StoreError
from blendrag.store.directories import OUT_OF_RESOURCES
from blendrag.store.files import Name, PayloadFiles, read_at
from blendrag.store.forking import renew_after_fork
from blendrag.store.format import Frame, frame
from blendrag.store.index import Index
from blendrag.store.index_errors import IndexOdd
from blendrag.store.kv import KVLayout
from blendrag.store.reader import DiskReader
from blendrag.store.tally import Tally
from blendrag.store.writing import DiskWriter

logger = logging.getLogger("blendrag.store")

#: Faults of the process, not of the file that could not be opened.
_NOT_THE_FILE = (*OUT_OF_RESOURCES, errno.EACCES, errno.EBADF)


class DiskReading:
    """The reading side of one :class:`DiskStore`. Thread-safe."""

    def __init__(
        self, files: PayloadFiles, index: Index, writer: DiskWriter | None, tally: Tally
    ) -> None:
        """``writer`` is ``None`` where nothing may be changed; there is no index then, either."""
        self.index_is_odd = False
        """The next put is to rebuild it; a query does not wait for that."""
        self._files = files
        self._index = index
        self._writer = writer
        self._tally = tally
        self._doubtful: set[Name] = set()
        self.renew_locks()
        renew_after_fork(self)

    def renew_locks(self) -> None:
        """See :mod:`forking`."""
        self._lock = threading.Lock()

    def find(self, namespace: str, key: str) -> Name | None:
        """Where a key's payload lies, by the index, or by listing while there is no index."""
        return self._found(namespace, key)[0]

    def _found(self, namespace: str, key: str) -> tuple[Name | None, bool]:
        """:meth:`find`, and whether by the index, which knows only what is durable."""
        if self._writer is not None:
            try:
                row = self._index.get(namespace, key)
                return None if row is None else row.name, True
            except IndexOdd:
                self.index_is_odd = True
            except StoreError:
                pass
        try:
            names = self._files.named(namespace, key)
        except OSError as exc:
            logger.warning("%s cannot be looked for (%s): a miss", key[:12], exc.strerror)
            return None, False
        return next((name for name in names if name not in self._doubtful), None), False

    def sound(self, namespace: str, key: str) -> Name | None:
        """A key's payload, provided that it is there and nobody doubts it yet."""
        return self._unless_doubtful(self.find(namespace, key))

    def _unless_doubtful(self, name: Name | None) -> Name | None:
        is_there = name is not None and name not in self._doubtful and self._files.exists(name)
        return name if is_there else None

    def contains(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.contains`. What is only listed may be another one's who is about to sync
        it, and nobody puts what is there."""
        found, is_durable = self._found(namespace, key)
        name = self._unless_doubtful(found)
        if name is None or is_durable or self._writer is None:
            return name is not None
        try:
            return self._writer.keep(name)
        except StoreError as exc:
            logger.warning("%s cannot be made durable (%s): a miss", name.file, exc)
            return False

    def doubtful(self, namespace: str, key: str) -> list[Name]:
        """Payloads of a key that were set aside, or could not be."""
        with self._lock:
            return [name for name in self._doubtful if name.entry == (namespace, key)]

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> DiskReader | None:
        """See :meth:`KVStore.open`."""
        expected = frame(layout, tokens)
        name = self.find(namespace, key)
        if name is None or name in self._doubtful:
            return None
        fd = self._open(name)
        if fd is None:
            return None
        checksums = self._believed(fd, expected, name)
        if checksums is None:
            return None
        doubt, counted = partial(self._doubt, name), partial(self._tally.add, "read_bytes")
        return DiskReader(fd, key, layout, tokens, expected, checksums, doubt, counted)

    def _open(self, name: Name) -> int | None:
        """Descriptor of a payload; ``None``, and whatever follows from that is done, without one."""
        try:
            return self._files.open(name)
        except FileNotFoundError:
            if self._writer is not None:
                self._writer.drop_row(name)
        except OSError as exc:
            if exc.errno in _NOT_THE_FILE:
                logger.warning("%s cannot be opened (%s): a miss", name.file, exc.strerror)
            else:
                self._doubt(name, f"cannot be opened ({exc.strerror or exc})")
        return None

    def _believed(self, fd: int, expected: Frame, name: Name) -> list[int] | None:
        """Checksums of a payload whose header is the expected one; otherwise it is closed."""
        fault = "its header or size is not what was put"
        checksums = None
        try:
            checksums = _verified_checksums(fd, expected, name)
        except OSError as exc:
            fault = f"cannot be read ({exc.strerror})"
        finally:
            if checksums is None:
                os.close(fd)
        if checksums is None:
            self._doubt(name, fault)
        return checksums

    def _doubt(self, name: Name, fault: str) -> None:
        """Set a payload aside. Called from reading threads; waits for nobody long."""
        self._tally.add("quarantined")
        with self._lock:
            self._doubtful.add(name)
        logger.warning("stored KV %s: %s; set aside, the chunk is a miss", name.file, fault)
        if self._writer is not None:
            self._writer.quarantine(name)


def _verified_checksums(fd: int, expected: Frame, name: Name) -> list[int] | None:
    if os.fstat(fd).st_size != expected.file_bytes:
        return None
    header = read_at(fd, expected.header_bytes)
    return expected.checksums(header, name.namespace, name.key)
