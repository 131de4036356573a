"""The disk tier: one verified payload file per chunk, a byte limit, least recently used goes first.

Owns the contract and what was used recently. What a KV becomes is :mod:`sealing`, where files lie
:mod:`files`, which there are :mod:`index`, how one is found and believed :mod:`reading`, and how the
directory is changed :mod:`writing`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from blendrag.errors import InvalidInputError, StoreError, StoreUnavailableError
from blendrag.store.base import StoreStats, TierStats
from blendrag.store.disk_errors import named_errors
from blendrag.store.files import PayloadFiles, new_name
from blendrag.store.forking import StaysHere, renew_after_fork
from blendrag.store.format import is_name
from blendrag.store.index import Index
from blendrag.store.kv import ChunkKV, KVLayout
from blendrag.store.limit import DEFAULT_DISK_BYTES, settle_limit
from blendrag.store.pins import Pins, Scope
from blendrag.store.reader import DiskReader
from blendrag.store.reading import DiskReading
from blendrag.store.room import Room
from blendrag.store.root import prepare
from blendrag.store.sealing import sealed
from blendrag.store.tally import Tally
from blendrag.store.writing import DiskWriter

logger = logging.getLogger("blendrag.store")

#: Entries whose use is remembered until it is written to the index; older uses are forgotten.
MAX_RECENT = 4096
#: How often a payload may be cleared away, by others, before it is indexed.
_TRIES = 5


class DiskStore(StaysHere):
    """A :class:`KVStore` on a directory. Thread-safe; several processes may share the directory."""

    def __init__(
        self,
        root: Path,
        limit_bytes: int | None,
        read_only: bool = False,
        default_limit_bytes: int = DEFAULT_DISK_BYTES,
    ) -> None:
        """Open or create the store at ``root``; reconcile it with its files if need be.

        The store remembers the ``limit_bytes`` it is given; ``None`` is the remembered one, and
        ``default_limit_bytes``, which is not remembered, where there is none.
        Raises :class:`StoreUnavailableError` for a directory that cannot or must not be used. A
        directory that cannot be written is opened for reading, with a warning.
        """
        self.root = Path(root).absolute()
        self.read_only = prepare(self.root, read_only)
        self._given_limit, self._default_limit = limit_bytes, default_limit_bytes
        settle_limit(self.root, limit_bytes, default_limit_bytes, self.read_only)
        with named_errors(f"opening store {self.root}"):
            self._files = PayloadFiles(self.root)
        self._index = Index(self.root / "index")
        self._pins, self._tally = Pins(), Tally()
        room = Room(
            self.root,
            self._files,
            self._index,
            lambda: self.limit_bytes,
            self._pins,
            self.flush_recency,
            self._tally,
        )
        self._writing = DiskWriter(self.root, self._files, self._index, room, self._tally)
        writer = None if self.read_only else self._writing
        self._reading = DiskReading(self._files, self._index, writer, self._tally)
        self._recent: dict[tuple[str, str], None] = {}
        self._closed = False
        self.renew_locks()
        renew_after_fork(self)
        try:
            if not self.read_only:
                self._writing.open()
        except BaseException:
            self._index.close()
            self._files.close()
            raise

    def renew_locks(self) -> None:
        """See :mod:`forking`."""
        self._lock = threading.Lock()
        self._put_lock = threading.Lock()

    @property
    def limit_bytes(self) -> int:
        """How large the store may be; without a limit of our own, what others say meanwhile."""
        if self._given_limit is not None:
            return self._given_limit
        return settle_limit(self.root, None, self._default_limit, self.read_only)

    # -- the contract ----------------------------------------------------------------------------

    def put(self, namespace: str, key: str, kv: ChunkKV) -> None:
        """See :meth:`KVStore.put`."""
        self._check(namespace, key)
        self._check_writable()
        with self._put_lock:
            if self._reading.index_is_odd:
                self._reading.index_is_odd = False
                self._writing.recover()
            there = self._reading.sound(namespace, key)
            if there is None or not self._writing.keep(there):
                self._write(namespace, key, kv)
                self._tally.add("puts")
        self._pins.note_put((namespace, key))
        self.note_use(namespace, key)

    def open(self, namespace: str, key: str, layout: KVLayout, tokens: int) -> DiskReader | None:
        """See :meth:`KVStore.open`."""
        self._check(namespace, key)
        reader = self._reading.open(namespace, key, layout, tokens)
        self._tally.add("misses" if reader is None else "hits")
        if reader is not None:
            self.note_use(namespace, key)
        return reader

    def contains(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.contains`."""
        self._check(namespace, key)
        return self._reading.contains(namespace, key)

    def delete(self, namespace: str, key: str) -> bool:
        """See :meth:`KVStore.delete`."""
        self._check(namespace, key)
        self._check_writable()
        return self._writing.delete(namespace, key)

    def keys(self, namespace: str) -> Iterator[str]:
        """See :meth:`KVStore.keys`."""
        with named_errors(f"listing store {self.root}"):
            for name in self._files.walk_namespace(namespace):
                if self._reading.find(namespace, name.key) == name:
                    yield name.key

    def pin_scope(self) -> AbstractContextManager[Scope]:
        """See :meth:`KVStore.pin_scope`."""
        return self._pins.scope()

    def pin(self, namespace: str, key: str) -> None:
        """See :meth:`KVStore.pin`."""
        self._check(namespace, key)
        self._check_writable()
        self._writing.pin(namespace, key)

    def stats(self) -> StoreStats:
        """See :class:`StoreStats`."""
        try:
            entries, size_bytes = self._index.totals()
        except StoreError:
            with named_errors(f"listing store {self.root}"):
                sizes = [self._files.size(name) for name in self._files.walk()]
            entries, size_bytes = len(sizes), sum(sizes)
        count = self._tally
        hits, read_bytes, evictions = count["hits"], count["read_bytes"], count["evictions"]
        tier = TierStats("disk", entries, size_bytes, self.limit_bytes, hits, read_bytes, evictions)
        return StoreStats(
            entries,
            size_bytes,
            hits,
            count["misses"],
            evictions,
            count["quarantined"],
            puts=count["puts"],
            tiers=(tier,),
        )

    def close(self) -> None:
        """Write down what was used, release everything. Idempotent."""
        if self._closed:
            return
        self.flush_recency()
        self._closed = True
        self._writing.close()
        self._index.close()
        self._files.close()

    # -- recovery and recency --------------------------------------------------------------------

    def recover(self) -> None:
        """See :meth:`DiskWriter.recover`."""
        self._check_writable()
        self._writing.recover()

    def flush_recency(self) -> None:
        """Write the uses since the last time to the index; best effort, failure only blurs LRU."""
        with self._lock:
            recent, self._recent = self._recent, {}
        if recent and not self.read_only:
            self._writing.touch(recent)

    def note_use(self, namespace: str, key: str) -> None:
        """Remember that this entry is used most recently."""
        with self._lock:
            self._recent.pop((namespace, key), None)
            self._recent[namespace, key] = None
            if len(self._recent) > MAX_RECENT:
                del self._recent[next(iter(self._recent))]

    # -- writing ---------------------------------------------------------------------------------

    def _write(self, namespace: str, key: str, kv: ChunkKV) -> None:
        """Damaged payloads that could not be set aside go first: the new one would yield to them."""
        payload = sealed(namespace, key, kv)
        doubtful = self._reading.doubtful(namespace, key)
        if doubtful:
            self._writing.remove(doubtful)
        for _ in range(_TRIES):
            name = new_name(namespace, key)
            if self._writing.put(name, payload.buffers, payload.size_bytes):
                return
        raise StoreUnavailableError(
            f"KV {key[:12]}… was removed from store {self.root} {_TRIES} times while it was put, "
            "expected nobody to clear the store meanwhile; put it again afterwards"
        )

    def _check(self, namespace: str, key: str) -> None:
        """Refuse malformed names and closed stores."""
        for text in (namespace, key):
            if not is_name(text):
                raise InvalidInputError(
                    f"{text!r} is no key or namespace, expected 64 lowercase hex digits; "
                    "use identity.chunk_key"
                )
        if self._closed:
            raise StoreUnavailableError(f"store {self.root} is closed; open it again")

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreUnavailableError(
                f"store {self.root} is read-only, expected one that can be written; "
                "change its permissions or choose another --store"
            )
