"""The disk tier: one verified payload file per chunk, a byte limit, least recently used evicted first.

Finds and opens payloads and decides what is in doubt; any doubt is a miss.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from blendrag.errors import CorruptKVError, StoreError, StoreUnavailableError
from blendrag.store.base import PinScope, ProcessBound, StoreStats
from blendrag.store.disk_writer import DiskWriter
from blendrag.store.durable import OUT_OF_RESOURCES, named_errors
from blendrag.store.encodings.codec import stored_layers
from blendrag.store.identity import require_name
from blendrag.store.index import IndexCorrupt
from blendrag.store.kv import ChunkKV, KVLayout
from blendrag.store.payload import (
    Frame,
    PayloadHeader,
    Read,
    frame,
    layer_checksum,
    open_payload,
    read_next,
)
from blendrag.store.payload_files import Name, new_name
from blendrag.store.reader import DiskReader
from blendrag.store.root import DEFAULT_DISK_BYTES, prepare, read_only_error, settle_limit
from blendrag.store.tensor_bytes import tensor_buffer

logger = logging.getLogger("blendrag.store")

#: Uses remembered until they are written to the index; older ones are forgotten.
MAX_RECENT = 4096
#: Attempts to put a payload that others remove before it is indexed.
_PUT_TRIES = 5
#: Errors of opening a file that are no fault of the file.
_NOT_THE_FILE = (*OUT_OF_RESOURCES, errno.EACCES, errno.EBADF)


class DiskStore(ProcessBound):
    """A :class:`KVStore` on a directory. Thread-safe; several processes may share the directory."""

    def __init__(self, root: Path, limit_bytes: int | None, read_only: bool = False) -> None:
        """Open or create the store at ``root``, and recover it after a crash.

        Limits: see :func:`settle_limit`. Raises :class:`StoreUnavailableError` for a directory that cannot
        or must not be used. One that cannot be written is opened for reading, with a warning.
        """
        super().__init__()
        self.root = Path(root).absolute()
        self.read_only = prepare(self.root, read_only)
        self._given_limit = limit_bytes
        settle_limit(self.root, limit_bytes, DEFAULT_DISK_BYTES, self.read_only)
        self._writer = DiskWriter(self.root, lambda: self.limit_bytes, self.flush_recency)
        self._files, self._index = self._writer.files, self._writer.index
        self._counters = self._writer.counters
        self._index_is_corrupt = False
        """The next put rebuilds the index; a query does not wait for that."""
        self._doubtful: set[Name] = set()
        """Payloads that were set aside, or could not be."""
        self._recent: dict[tuple[str, str], None] = {}
        self._recent_lock = threading.Lock()
        self._put_lock = threading.Lock()
        self._closed = False
        if not self.read_only:
            self._writer.open()

    @property
    def limit_bytes(self) -> int:
        """The store's limit; if none was given here, other processes may change it."""
        if self._given_limit is not None:
            return self._given_limit
        return settle_limit(self.root, None, DEFAULT_DISK_BYTES, self.read_only)

    def put(self, namespace: str, key: str, kv: ChunkKV) -> None:
        self._check(namespace, key)
        self._check_writable()
        with self._put_lock:
            if self._index_is_corrupt:
                self._index_is_corrupt = False
                self._writer.recover()
            name = self._sound(self.find(namespace, key))
            if name is None or not self._writer.keep(name):
                self._write_kv(namespace, key, kv)
                self._counters.add("puts")
        self._writer.pins.note_put((namespace, key))
        self.note_use(namespace, key)

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> DiskReader | None:
        self._check(namespace, key)
        reader = self._open(namespace, key, layout, tokens)
        self._counters.add("misses" if reader is None else "hits")
        if reader is not None:
            self.note_use(namespace, key)
        return reader

    def peek(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> DiskReader | None:
        """:meth:`open`, not counted as a use."""
        self._check(namespace, key)
        return self._open(namespace, key, layout, tokens)

    def contains(self, namespace: str, key: str) -> bool:
        self._check(namespace, key)
        found, is_durable = self._find(namespace, key)
        name = self._sound(found)
        if name is None or is_durable or self.read_only:
            return name is not None
        try:  # another process may be about to sync it
            return self._writer.keep(name)
        except StoreError as exc:
            logger.warning("%s cannot be made durable (%s): a miss", name.file, exc)
            return False

    def delete(self, namespace: str, key: str) -> bool:
        self._check(namespace, key)
        self._check_writable()
        return self._writer.delete(namespace, key)

    def keys(self, namespace: str) -> Iterator[str]:
        self.check_process()
        with named_errors(f"listing store {self.root}"):
            for name in self._files.walk(namespace):
                if self.find(namespace, name.key) == name:
                    yield name.key

    def recent_keys(self, most: int) -> list[str]:
        """Keys of at most that many entries of all namespaces, most recently used first."""
        try:
            return self._index.recent_keys(most)
        except StoreError:  # it is rebuilt by the next put
            return []

    def pin_scope(self) -> AbstractContextManager[PinScope]:
        self.check_process()
        return self._writer.pins.scope()

    def pin(self, namespace: str, key: str) -> None:
        self._check(namespace, key)
        self._check_writable()
        self._writer.pin(namespace, key)

    def pinned(self, namespace: str) -> set[str]:
        """Keys that are never evicted."""
        return {key for within, key in self._files.pinned.all() if within == namespace}

    def learned_limit_bytes(self) -> int:
        """See :meth:`KVStore.learned_limit_bytes`."""
        self.check_process()
        return self._writer.with_index(self._writer.learned_limit_bytes)

    def give_up_learned(self, size_bytes: int) -> bool:
        """See :meth:`KVStore.give_up_learned`."""
        self.check_process()
        self._check_writable()
        return self._writer.give_up_learned(size_bytes)

    def stats(self) -> StoreStats:
        self.check_process()
        try:
            entries, size_bytes = self._index.totals()
        except StoreError:
            with named_errors(f"listing store {self.root}"):
                sizes = [self._files.size(name) for name in self._files.walk()]
            entries, size_bytes = len(sizes), sum(sizes)
        return self._counters.stats("disk", entries, size_bytes, self.limit_bytes)

    def close(self) -> None:
        """Write recent uses to the index and release everything. Idempotent; does nothing in a fork."""
        if self._closed or self.is_inherited:
            return
        self.flush_recency()
        self._closed = True
        self._writer.close()

    def _check(self, namespace: str, key: str) -> None:
        """Refuse malformed names, closed stores and other processes."""
        self.check_process()
        require_name(namespace)
        require_name(key)
        if self._closed:
            raise StoreUnavailableError(f"store {self.root} is closed; open it again")

    def _check_writable(self) -> None:
        if self.read_only:
            raise read_only_error(self.root)

    # -- payloads as they are, for the remote tier ------------------------------------------------

    def payload(
        self, namespace: str, key: str
    ) -> AbstractContextManager[tuple[PayloadHeader, Read]] | None:
        """An entry's header, and what reads the bytes after it (:func:`open_payload`); ``None`` if absent."""
        self._check(namespace, key)
        name = self._sound(self.find(namespace, key))
        return None if name is None else open_payload(self._files, name)

    def put_stored(
        self,
        namespace: str,
        key: str,
        expected: Frame,
        checksums: Sequence[int],
        layers: Sequence[Any],
    ) -> None:
        """:meth:`put` for layers as they are stored, which the caller has verified."""
        self._check(namespace, key)
        self._check_writable()
        with self._put_lock:
            if self._sound(self.find(namespace, key)) is None:
                header = expected.header(namespace, key, checksums)
                self._write(namespace, key, [header, *layers], expected.file_bytes)
        self.note_use(namespace, key)

    # -- finding and opening ---------------------------------------------------------------------

    def find(self, namespace: str, key: str) -> Name | None:
        """Where a key's payload is, by the index, or by listing if there is no usable index."""
        return self._find(namespace, key)[0]

    def _find(self, namespace: str, key: str) -> tuple[Name | None, bool]:
        """:meth:`find`, and whether by the index, which knows only durable payloads."""
        if not self.read_only:
            try:
                return self._index.get(namespace, key), True
            except IndexCorrupt:
                self._index_is_corrupt = True
            except StoreError:
                pass
        try:
            names = self._files.named(namespace, key)
        except OSError as exc:
            logger.warning("%s cannot be looked for (%s): a miss", key[:12], exc.strerror)
            return None, False
        return next((name for name in names if name not in self._doubtful), None), False

    def _sound(self, name: Name | None) -> Name | None:
        """``name`` if its file is there and not in doubt."""
        is_there = name is not None and name not in self._doubtful and self._files.exists(name)
        return name if is_there else None

    def _open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> DiskReader | None:
        expected = frame(layout, tokens)
        name = self.find(namespace, key)
        if name is None or name in self._doubtful:
            return None
        try:
            fd = self._files.open(name)
        except FileNotFoundError:
            if not self.read_only:
                self._writer.drop_row(name)
            return None
        except OSError as exc:
            if exc.errno in _NOT_THE_FILE:
                logger.warning("%s cannot be opened (%s): a miss", name.file, exc.strerror)
            else:
                self._doubt(name, f"cannot be opened ({exc.strerror or exc})")
            return None
        checksums, fault = None, "its header or size is not what was put"
        try:
            if os.fstat(fd).st_size == expected.file_bytes:
                header = read_next(fd, expected.header_bytes)
                checksums = expected.checksums(header, namespace, key)
        except (OSError, CorruptKVError) as exc:
            fault = str(exc)
        finally:
            if checksums is None:
                os.close(fd)
        if checksums is None:
            self._doubt(name, fault)
            return None
        doubt, counted = partial(self._doubt, name), partial(self._counters.add, "read_bytes")
        return DiskReader(fd, key, layout, tokens, expected, checksums, doubt, counted)

    def _doubt(self, name: Name, fault: str) -> None:
        """Set a payload aside. Called from reading threads; waits only briefly."""
        self._counters.add("quarantined")
        self._doubtful.add(name)
        logger.warning("stored KV %s: %s; set aside, the chunk is a miss", name.file, fault)
        if not self.read_only:
            self._writer.quarantine(name)

    # -- writing, recovery and recency -----------------------------------------------------------

    def _write_kv(self, namespace: str, key: str, kv: ChunkKV) -> None:
        layers, checksums = [], []
        for number, layer in enumerate(stored_layers(key, kv)):
            layers.append(layer)
            checksums.append(layer_checksum(key, number, tensor_buffer(layer)))
        expected = frame(kv.layout, kv.tokens)
        buffers = [expected.header(namespace, key, checksums), *map(tensor_buffer, layers)]
        self._write(namespace, key, buffers, expected.file_bytes)

    def _write(self, namespace: str, key: str, buffers: Sequence[Any], size_bytes: int) -> None:
        # Damaged payloads that could not be set aside go first: the new one would yield to them.
        doubtful = [name for name in list(self._doubtful) if name.entry == (namespace, key)]
        if doubtful:
            self._writer.remove(doubtful)
        for _ in range(_PUT_TRIES):
            if self._writer.put(new_name(namespace, key), buffers, size_bytes):
                return
        raise StoreUnavailableError(
            f"KV {key[:12]}… was removed from store {self.root} {_PUT_TRIES} times while it was put, "
            "expected no process to clear the store meanwhile; put it again afterwards"
        )

    def recover(self) -> None:
        self.check_process()
        self._check_writable()
        self._writer.recover()

    def flush_recency(self) -> None:
        """Write recent uses to the index; best effort, a failure only blurs the order of eviction."""
        with self._recent_lock:
            recent, self._recent = self._recent, {}
        if recent and not self.read_only:
            self._writer.touch(recent)

    def note_use(self, namespace: str, key: str) -> None:
        """Remember that this entry was used most recently."""
        with self._recent_lock:
            self._recent.pop((namespace, key), None)
            self._recent[namespace, key] = None
            if len(self._recent) > MAX_RECENT:
                del self._recent[next(iter(self._recent))]
