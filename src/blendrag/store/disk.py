"""The disk tier: one verified payload file per chunk, a byte limit, least recently used goes first.

Owns the order of steps that makes ``put`` atomic and durable (make room, check free space, write a
temporary, fsync, rename, fsync the directory, index) and the rule that any doubt is a miss. What a
payload looks like is :mod:`format`, where files lie is :mod:`files`, which there are is
:mod:`index`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from blendrag.errors import (
    InvalidInputError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from blendrag.kv import ChunkKV, KVLayout
from blendrag.store.base import StoreStats
from blendrag.store.files import Name, PayloadFiles, new_name
from blendrag.store.format import Frame, frame, is_name, layer_checksum
from blendrag.store.index import Index, IndexLocked, IndexOdd, Row, sync_database
from blendrag.store.pins import Pins, Scope
from blendrag.store.raw import all_finite, on_cpu, tensor_buffer
from blendrag.store.reader import DiskReader
from blendrag.store.recovery import reconcile
from blendrag.store.root import megabytes, prepare, store_error
from blendrag.store.writers import Writer, clear_dead

logger = logging.getLogger("blendrag.store")
_T = TypeVar("_T")

#: Left free on the file system for the index and everybody else.
RESERVE_BYTES = 4 << 20
#: Entries whose use is remembered until it is written to the index; older uses are forgotten.
MAX_RECENT = 4096
#: What a query may wait for the index when it merely wants to drop a row.
_QUERY_WAIT_S = 0.05
#: Faults of the process, not of the file that could not be opened.
_NOT_THE_FILE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EBADF)


class DiskStore:
    """A :class:`KVStore` on a directory. Thread-safe; several processes may share the directory."""

    def __init__(self, root: Path, limit_bytes: int, read_only: bool = False) -> None:
        """Open or create the store at ``root``; reconcile it with its files if need be.

        Raises :class:`StoreUnavailableError` for a directory that cannot or must not be used. A
        directory that cannot be written is opened for reading, with a warning.
        """
        self.root = Path(root)
        self.limit_bytes = limit_bytes
        self.read_only = prepare(self.root, read_only)
        self._files = PayloadFiles(self.root)
        self._index = Index(self.root / "index")
        self._writer: Writer | None = None
        self._pins = Pins()
        self._recent: dict[tuple[str, str], None] = {}
        self._doubtful: set[Name] = set()
        self._hits = self._misses = self._evictions = self._quarantined = 0
        self._closed = False
        self._fresh_locks()
        if not self.read_only:
            self._open_index()

    def _fresh_locks(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._put_lock = threading.Lock()

    def _open_index(self) -> None:
        try:
            with self._index.exclusive():
                is_new = self._index.open()
                if clear_dead(self.root / "tmp") or is_new:
                    self._reconcile()
        except IndexLocked as exc:
            logger.warning("%s; chunks are found by listing directories meanwhile", exc)
        except IndexOdd:
            self.recover()
        except OSError as exc:
            raise store_error(exc, f"opening store {self.root}") from exc

    # -- the contract ----------------------------------------------------------------------------

    def put(self, namespace: str, key: str, kv: ChunkKV) -> None:
        """See :meth:`KVStore.put`."""
        self._check(namespace, key)
        if self.read_only:
            raise StoreUnavailableError(
                f"store {self.root} is read-only, expected one that can be written; "
                "change its permissions or choose another --store"
            )
        with self._put_lock:
            if not self._has(namespace, key):
                self._write(new_name(namespace, key), kv)
        self._pins.note_put((namespace, key))
        self.note_use(namespace, key)

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> DiskReader | None:
        """See :meth:`KVStore.open`."""
        self._check(namespace, key)
        reader = self._open(namespace, key, layout, tokens)
        with self._lock:
            if reader is None:
                self._misses += 1
            else:
                self._hits += 1
        if reader is not None:
            self.note_use(namespace, key)
        return reader

    def contains(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.contains`."""
        self._check(namespace, key)
        return self._find(namespace, key) is not None

    def delete(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.delete`."""
        self._check(namespace, key)
        if self.read_only:
            raise StoreUnavailableError(
                f"store {self.root} is read-only, nothing can be deleted from it; "
                "change its permissions"
            )
        return self._with_index(partial(self._delete, namespace, key))

    def keys(self, namespace: str) -> Iterator[str]:
        """See :meth:`KVStore.keys`."""
        for name in self._files.walk_namespace(namespace):
            if self._find(namespace, name.key) == name:
                yield name.key

    def pin_scope(self) -> AbstractContextManager[Scope]:
        """See :meth:`KVStore.pin_scope`."""
        return self._pins.scope()

    def stats(self) -> StoreStats:
        """See :class:`StoreStats`."""
        try:
            entries, size_bytes = self._index.totals()
        except StoreError:
            sizes = [self._files.size(name) for name in self._files.walk()]
            entries, size_bytes = len(sizes), sum(sizes)
        with self._lock:
            return StoreStats(
                entries,
                size_bytes,
                self._hits,
                self._misses,
                self._evictions,
                self._quarantined,
            )

    def close(self) -> None:
        """Write down what was used, release everything. Idempotent."""
        if self._closed:
            return
        self.flush_recency()
        self._closed = True
        if self._writer is not None:
            self._writer.close()
        self._index.close()
        self._files.close()

    # -- recovery and recency --------------------------------------------------------------------

    def recover(self) -> None:
        """Rebuild the index from the files where it is odd, drop dead rows, clear what crashed
        writers left, evict to the limit. Safe while others use the store."""
        with self._index.exclusive():
            try:
                self._index.open()
                clear_dead(self.root / "tmp")
                self._reconcile()
            except IndexOdd as exc:
                logger.warning("%s: the index is rebuilt from the files", exc)
                self._index.set_aside()
                self._index.open()
                self._reconcile()

    def _reconcile(self) -> None:
        """Caller holds the index lock."""
        quarantined = reconcile(self._files, self._index)
        with self._lock:
            self._quarantined += quarantined
        with contextlib.suppress(StoreFullError):
            self._make_room(0)

    def flush_recency(self) -> None:
        """Write the uses since the last time to the index; best effort, failure only blurs LRU."""
        with self._lock:
            recent, self._recent = self._recent, {}
        if recent and not self.read_only:
            with contextlib.suppress(StoreError), self._index.exclusive(_QUERY_WAIT_S):
                self._index.touch(recent)

    def note_use(self, namespace: str, key: str) -> None:
        """Remember that this entry is used most recently."""
        with self._lock:
            self._recent.pop((namespace, key), None)
            self._recent[namespace, key] = None
            if len(self._recent) > MAX_RECENT:
                del self._recent[next(iter(self._recent))]

    # -- reading ---------------------------------------------------------------------------------

    def _find(self, namespace: str, key: str) -> Name | None:
        """Where a key's payload lies, by the index, or by listing while there is no index."""
        if not self.read_only:
            try:
                row = self._index.get(namespace, key)
                return None if row is None else row.name
            except StoreError:
                pass
        names = self._files.named(namespace, key)
        return next((name for name in names if name not in self._doubtful), None)

    def _open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> DiskReader | None:
        expected = frame(layout, tokens)
        name = self._find(namespace, key)
        if name is None or name in self._doubtful:
            return None
        try:
            fd = self._files.open(name)
        except FileNotFoundError:
            self._drop_row(name)
            return None
        except OSError as exc:
            if exc.errno in _NOT_THE_FILE:
                logger.warning("%s cannot be opened (%s): a miss", name.file, exc.strerror)
            else:
                self._quarantine(name, f"cannot be opened ({exc.strerror or exc})")
            return None
        try:
            checksums = _verified_checksums(fd, expected, name)
        except OSError as exc:
            checksums, fault = None, f"cannot be read ({exc.strerror})"
        else:
            fault = "its header or size is not what was put"
        if checksums is None:
            os.close(fd)
            self._quarantine(name, fault)
            return None
        doubt = partial(self._quarantine, name)
        return DiskReader(fd, key, layout, tokens, expected, checksums, doubt)

    def _quarantine(self, name: Name, fault: str) -> None:
        """Set a doubtful payload aside. Called from reading threads; waits for nobody long."""
        with self._lock:
            self._quarantined += 1
            self._doubtful.add(name)
        logger.warning("stored KV %s: %s; set aside, the chunk is a miss", name.file, fault)
        if self.read_only:
            return
        with contextlib.suppress(OSError):
            self._files.quarantine(name)
        self._drop_row(name)

    def _drop_row(self, name: Name) -> None:
        with contextlib.suppress(StoreError), self._index.exclusive(_QUERY_WAIT_S):
            self._index.drop([name])

    # -- writing ---------------------------------------------------------------------------------

    def _has(self, namespace: str, key: str) -> bool:
        name = self._find(namespace, key)
        return name is not None and name not in self._doubtful and self._files.exists(name)

    def _write(self, name: Name, kv: ChunkKV) -> None:
        """All steps of a put. Caller holds the put lock."""
        expected = frame(kv.layout, kv.tokens)
        layers = [on_cpu(layer) for layer in kv.layers]
        _check_finite(layers, kv, name)
        buffers = [tensor_buffer(layer) for layer in layers]
        checksums = [layer_checksum(name.key, i, buffer) for i, buffer in enumerate(buffers)]
        header = expected.header(name.namespace, name.key, checksums)
        size_bytes = expected.file_bytes
        writer = self._with_index(partial(self._begin, size_bytes))
        self._check_free_space(size_bytes)
        try:
            self._files.write(name, writer.temporary(), [header, *buffers])
        except OSError as exc:
            raise store_error(exc, f"writing to store {self.root}", size_bytes) from exc
        try:
            self._with_index(partial(self._finish, Row(name, size_bytes)))
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.remove(name)
            raise

    def _begin(self, size_bytes: int) -> Writer:
        """Claim to be writing and make room. Caller holds the index lock."""
        if self._writer is None or self._writer.pid != os.getpid():
            before_release = partial(sync_database, self.root / "index")
            try:
                self._writer = Writer(self.root / "tmp", before_release)
            except OSError as exc:
                raise store_error(exc, f"writing to store {self.root}", size_bytes) from exc
        self._make_room(size_bytes)
        return self._writer

    def _finish(self, row: Row) -> None:
        """Index what was written, unless somebody was faster. Caller holds the index lock."""
        other = self._index.get(row.name.namespace, row.name.key)
        if other is not None and other.name != row.name and self._files.exists(other.name):
            self._files.remove(row.name)
            return
        self._make_room(row.size_bytes)
        self._index.add(row)

    def _make_room(self, needed_bytes: int) -> None:
        """Evict the least recently used until ``needed_bytes`` fit. Caller holds the index lock.

        Evicts nothing, and raises :class:`StoreFullError`, when that cannot be reached.
        """
        entries, size_bytes = self._index.totals()
        excess = size_bytes + needed_bytes - self.limit_bytes
        if excess <= 0:
            return
        self.flush_recency()
        victims: list[Name] = []
        for row in self._index.oldest() if needed_bytes <= self.limit_bytes else ():
            if excess <= 0:
                break
            if (row.name.namespace, row.name.key) not in self._pins:
                victims.append(row.name)
                excess -= row.size_bytes
        if excess > 0:
            raise StoreFullError(
                f"the store's limit of {megabytes(self.limit_bytes)} has no room for "
                f"{megabytes(needed_bytes)} more beside what must be kept ({entries} entries, "
                f"{megabytes(size_bytes)}); raise --disk-bytes by {megabytes(excess)} or more",
                needed_bytes,
            )
        self._index.drop(victims)
        for name in victims:
            with contextlib.suppress(OSError):
                self._files.remove(name)
        with self._lock:
            self._evictions += len(victims)

    def _check_free_space(self, size_bytes: int) -> None:
        status = os.statvfs(self.root)
        free_bytes = status.f_bavail * status.f_frsize
        if free_bytes < size_bytes + RESERVE_BYTES:
            raise StoreFullError(
                f"the disk of store {self.root} has {megabytes(free_bytes)} left, expected "
                f"{megabytes(size_bytes + RESERVE_BYTES)}; free some space or choose another "
                "--store",
                size_bytes + RESERVE_BYTES,
            )

    def _delete(self, namespace: str, key: str) -> bool:
        """Caller holds the index lock."""
        names = self._files.named(namespace, key)
        self._index.drop(names)
        for name in names:
            self._files.remove(name)
        return bool(names)

    def _with_index(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` under the index lock, after a rebuild should the index turn out odd."""
        try:
            with self._index.exclusive():
                try:
                    return action()
                except IndexOdd:
                    self.recover()
                    return action()
        except IndexLocked as exc:
            raise StoreUnavailableError(
                f"{exc}, expected it to be free within seconds; "
                "wait for the other process or stop it"
            ) from exc

    def _check(self, namespace: str, key: str) -> None:
        """Refuse malformed names and closed stores; renew locks after a fork."""
        for text in (namespace, key):
            if not is_name(text):
                raise InvalidInputError(
                    f"{text!r} is no key or namespace, expected 64 lowercase hex digits; "
                    "use identity.chunk_key"
                )
        if self._closed:
            raise StoreUnavailableError(f"store {self.root} is closed; open it again")
        if self._pid != os.getpid():
            self._fresh_locks()


def _verified_checksums(fd: int, expected: Frame, name: Name) -> list[int] | None:
    if os.fstat(fd).st_size != expected.file_bytes:
        return None
    header = os.pread(fd, expected.header_bytes, 0)
    return expected.checksums(header, name.namespace, name.key)


def _check_finite(layers: list[torch.Tensor], kv: ChunkKV, name: Name) -> None:
    for i, layer in enumerate(layers):
        if not all_finite(layer, kv.layout.dtype):
            raise InvalidInputError(
                f"KV {name.key[:12]}… has NaN or infinity in layer {i}, expected finite numbers; "
                "compute it in bfloat16 or float32, or leave this chunk out"
            )
