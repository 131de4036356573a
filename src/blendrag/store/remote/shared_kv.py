"""What a store on this machine shares with others through a remote.

KV that is put here is copied there in the background. KV that was read from there is kept on the local disk
and in memory afterwards; only the layers that the query did not read are requested once more.

Machines with different kernels or library versions may share one remote. So each namespace there has a
probe: the KV of a few tokens, put before any other KV and never replaced. Until this machine has compared it,
the remote's KV of that namespace counts as absent, and none is copied there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np

from blendrag.errors import (
    CorruptKVError,
    InvalidInputError,
    StoreError,
    StoreUnavailableError,
)
from blendrag.store.base import ForeignKVError, Probe, WantedKV
from blendrag.store.disk import DiskStore
from blendrag.store.identity import probe_key
from blendrag.store.kv import KVLayout
from blendrag.store.memory import MemoryBlock
from blendrag.store.payload import PayloadHeader, Read, verified_pieces
from blendrag.store.promotion import Promotion, best_effort
from blendrag.store.remote.objects import WRITE_S
from blendrag.store.remote.tier import RemoteReader, RemoteTier

logger = logging.getLogger("blendrag.store")

#: Seconds until a remote that gave no probe is asked for it again.
AGAIN_S = 10.0
#: Copies at a time, and how many chunks may wait for one.
UPLOADS, QUEUED_UPLOADS = 4, 32
#: Chunks that are remembered: as known to be in the remote, so that it is not asked again, and as not copied.
REMEMBERED = 1 << 16
#: Chunks that are tried again at a time.
TRIED_AGAIN = 2
#: Bytes of chunks that may wait to be kept on the local disk.
KEPT_BYTES = 512 << 20


class SharedKV:
    """A remote tier as one store uses it. Thread-safe. See :class:`blendrag.store.tiered.KVStore`."""

    def __init__(self, tier: RemoteTier, disk: DiskStore, promotion: Promotion) -> None:
        self.tier = tier
        self.agreement = Agreement(disk, tier)
        self._disk = disk
        self._promotion = promotion
        self.uploads = Uploads(disk, tier, self.agreement)
        promotion.when_idle = self.uploads.try_again
        self._kept_bytes = 0
        self._lock = threading.Lock()

    # -- reading ---------------------------------------------------------------------------------

    def open_all(
        self,
        wanted: Sequence[WantedKV],
        layout: KVLayout,
        first_s: Callable[[], float] | None = None,
    ) -> list[RemoteReader | None]:
        """See :meth:`RemoteTier.open_all`; leaves out what was not compared with this machine's own KV."""
        readers: list[RemoteReader | None] = [None] * len(wanted)
        usable = [at for at, each in enumerate(wanted) if each.namespace in self.agreement]
        found = self.tier.open_all([wanted[at] for at in usable], layout, first_s)
        for at, reader in zip(usable, found, strict=True):
            if reader is not None:
                reader.on_close = self._keep_later
                readers[at] = reader
        return readers

    def found(self, namespace: str, keys: Iterable[str], durable: bool) -> set[str]:
        """See :meth:`RemoteTier.found`; none if they were not compared with what this machine computes."""
        agrees = self.agreement.reach(namespace)
        return self.tier.found(namespace, keys, durable) if agrees else set()

    def _keep_later(self, reader: RemoteReader) -> bool:
        """Queue a chunk that was read, to be kept on the local disk and in memory; whether there was room."""
        size_bytes = reader.frame.file_bytes
        with self._lock:
            fits = self._kept_bytes + size_bytes <= KEPT_BYTES
            self._kept_bytes += size_bytes * fits
        if not fits:
            self._promotion.counters.add("drops")
            return False
        if self._promotion.submit(reader.namespace, reader.key, partial(self._keep, reader)):
            return True
        self._forget_kept(size_bytes)
        return False

    def _keep(self, reader: RemoteReader) -> None:
        entry = reader.namespace, reader.key
        try:
            with best_effort("a chunk from the remote was not kept on the local disk"):
                layers = reader.whole(self._promotion.left_s)
                self.uploads.note_known(*entry)
                if not self._disk.read_only:
                    self._disk.put_stored(*entry, reader.frame, reader.checksums, layers)
                arrays = [np.frombuffer(layer, dtype=np.uint8) for layer in layers]
                block = MemoryBlock(reader.layout, reader.tokens, arrays)
                self._promotion.insert(*entry, block)
        finally:
            self._forget_kept(reader.frame.file_bytes)
            reader.release()

    def _forget_kept(self, size_bytes: int) -> None:
        with self._lock:
            self._kept_bytes -= size_bytes

    # -- writing ---------------------------------------------------------------------------------

    def copy(self, namespace: str, key: str, waits: bool = True) -> bool:
        """See :meth:`Uploads.offer`; nothing is copied from a read-only store."""
        return self._disk.read_only or self.uploads.offer(namespace, key, waits=waits)

    def claim(self, namespace: str, keys: Iterable[str]) -> None:
        listed = sorted(set(keys))
        if self._disk.read_only or not listed:
            return
        gone = self.tier.claim(namespace, listed)
        if gone:
            self.uploads.forget_known(namespace, gone)
            raise StoreUnavailableError(
                f"{len(gone)} chunks are no longer in remote {self.tier.url} (blendrag store gc --remote?) "
                "or are damaged; run this again, which copies or computes them"
            )

    def ensure(self, namespace: str, keys: frozenset[str]) -> frozenset[str]:
        """Those of ``keys`` that are durable there, after copying what only this machine has.

        Raises :class:`StoreUnavailableError`.
        """
        if self._disk.read_only:
            raise StoreUnavailableError(
                f"store {self._disk.root} is read-only, expected one that copies its KV; open it for writing"
            )
        if not self.agreement.reach(namespace):
            raise StoreUnavailableError(
                self.tier.trouble
                or f"KV of remote {self.tier.url} was not compared with what this machine computes; ingest "
                "again with this remote"
            )
        durable = self.tier.durable(namespace, keys)
        copied = {key for key in keys - durable if self._disk.contains(namespace, key)}
        for key in sorted(copied):
            self.uploads.offer(namespace, key, is_missing=True)
        self.uploads.flush()
        return frozenset(durable | copied)

    def close(self) -> None:
        """Finish copies, end all requests. Idempotent."""
        self.uploads.close()
        self.tier.close()


class Agreement:
    """Which namespaces of the remote may be used. Thread-safe: two threads may compare the same one."""

    def __init__(self, disk: DiskStore, remote: RemoteTier) -> None:
        self._disk, self._remote = disk, remote
        self._agreed: set[str] = set()
        """Namespaces that were compared with the model."""
        self._copied: set[str] = set()
        """Those whose probe was compared with its local copy, because the model was not loaded."""
        self._foreign: dict[str, str] = {}
        self._again_at: dict[tuple[str, bool], float] = {}

    def __contains__(self, namespace: str) -> bool:
        return namespace in self._agreed or namespace in self._copied

    def reach(
        self, namespace: str, probe: Callable[[], Probe] | None = None, create: bool = False
    ) -> bool:
        """Whether that namespace may be used; compares its probe the first time.

        ``probe`` needs the loaded model. Without it, the remote's probe is compared with the copy on the
        local disk, which counts until the model is loaded. ``create``: put a probe into an empty namespace.
        ``False`` if the remote has no probe or does not answer. Raises :class:`ForeignKVError` for KV that
        this machine does not compute.
        """
        if namespace in self._agreed or (probe is None and namespace in self._copied):
            return True
        if namespace in self._foreign:
            raise ForeignKVError(self._foreign[namespace])
        attempt = namespace, probe is not None
        is_early = time.monotonic() < self._again_at.get(attempt, 0.0) and not create
        if is_early or self._remote.trouble:
            return False
        try:
            self._remote.check()
            if probe is None:
                is_same = self._is_copied(namespace)
            else:
                self._copied.discard(namespace)
                is_same = self._is_alike(namespace, probe(), create)
        except InvalidInputError as exc:  # it was down when it was opened, and cannot be used
            raise self._refuse(namespace, str(exc)) from exc
        except ForeignKVError:
            raise
        except StoreError as exc:
            logger.info("the probe of remote %s was not compared: %s", self._remote.url, exc)
            is_same = False
        if is_same:
            (self._copied if probe is None else self._agreed).add(namespace)
        self._again_at[attempt] = time.monotonic() + AGAIN_S
        return is_same

    def _is_alike(self, namespace: str, probe: Probe, create: bool) -> bool:
        found = self._read(namespace, probe)
        if found is None and create and self._create(namespace, probe):
            found = self._read(namespace, probe)
        if found is None:
            return False
        reader, layers = found
        try:
            if not probe.is_alike(reader):
                raise self._refuse(
                    namespace,
                    f"remote {self._remote.url} holds KV of this model that it does not compute on this "
                    "machine, expected the same; use the versions of blendrag, torch and transformers that "
                    "filled it, or another prefix",
                )
            if not self._disk.read_only:
                self._keep(namespace, reader, layers)
        finally:
            reader.release()
        return True

    def _read(self, namespace: str, probe: Probe) -> tuple[RemoteReader, list[memoryview]] | None:
        """The remote's probe, which may have been repaired since it was found damaged."""
        key = probe_key(namespace)
        self._remote.forget_doubt(namespace, key)
        reader = self._remote.peek(namespace, key, probe.layout, probe.tokens)
        if reader is None:
            return None
        try:
            return reader, reader.whole(self._remote.timeout_s)
        except CorruptKVError:
            reader.release()
            return None

    def _keep(self, namespace: str, reader: RemoteReader, layers: list[memoryview]) -> None:
        """Copy the probe to the local disk, for :meth:`_is_copied`."""
        key = reader.key
        try:
            kept = self._kept(namespace)
            if kept is None or kept[1] != b"".join(layers):
                self._disk.delete(namespace, key)
                self._disk.put_stored(namespace, key, reader.frame, reader.checksums, layers)
            self._disk.pin(namespace, key)
        except StoreError as exc:
            logger.info("the probe of remote %s was not kept: %s", self._remote.url, exc)

    def _create(self, namespace: str, probe: Probe) -> bool:
        """Put the probe if the namespace is empty. Another machine may put its own first.

        A damaged one is replaced by a machine that has compared it before.
        """
        key, short = probe_key(namespace), namespace[:12]
        if self._remote.is_doubtful(namespace, key):
            if not self._is_kept(namespace, probe):
                raise ForeignKVError(  # not remembered, because another machine may repair it
                    f"the probe of namespace {short} in remote {self._remote.url} is damaged, so its KV "
                    "cannot be compared; ingest from a machine that has used it, which repairs it, or remove "
                    f"the KV (blendrag store clear --remote URL --namespace {short})"
                )
        else:
            is_empty = next(self._remote.keys(namespace), None) is None
            if self._remote.trouble:
                return False
            if not is_empty:
                raise self._refuse(
                    namespace,
                    f"remote {self._remote.url} holds KV of namespace {short} without the probe by which it "
                    "is compared, so it cannot be used; remove it (blendrag store clear --remote URL "
                    f"--namespace {short}), or choose another prefix",
                )
            self._disk.delete(namespace, key)  # of another remote
            self._disk.put(namespace, key, probe.compute())
            self._disk.pin(namespace, key)
        payload = self._disk.payload(namespace, key)
        if payload is None:
            return False
        with payload as found:
            self._remote.put(*found)
        return True

    def _is_kept(self, namespace: str, probe: Probe) -> bool:
        """Whether the local disk has the probe, and the model still computes it."""
        reader = self._disk.peek(namespace, probe_key(namespace), probe.layout, probe.tokens)
        if reader is None:
            return False
        with contextlib.closing(reader):
            return probe.is_alike(reader)

    def _is_copied(self, namespace: str) -> bool:
        """Whether the local disk and the remote have the same bytes of the probe."""
        kept = self._kept(namespace)
        if kept is None:
            return False
        header, data = kept
        reader = self._remote.peek(namespace, header.key, header.layout, header.tokens)
        if reader is None:
            return False
        try:
            return data == b"".join(reader.whole(self._remote.timeout_s))
        finally:
            reader.release()

    def _kept(self, namespace: str) -> tuple[PayloadHeader, bytes] | None:
        """The probe on the local disk."""
        payload = self._disk.payload(namespace, probe_key(namespace))
        if payload is None:
            return None
        with payload as (header, read):
            return header, b"".join(verified_pieces(header, read))

    def _refuse(self, namespace: str, why: str) -> ForeignKVError:
        self._foreign[namespace] = why
        logger.warning("KV of the remote is not used: %s", why)
        return ForeignKVError(why)


@dataclass
class _Owed:
    """An entry that is not copied yet."""

    threads: set[threading.Thread] = field(default_factory=set)
    """Those that offered it."""
    failure: str = ""
    """Why the last attempt failed."""


class Uploads:
    """Copies what threads offer. Thread-safe.

    An upload holds its payload's open file, which survives eviction. One that failed is tried again by the
    :meth:`flush` of its thread, and by :meth:`try_again`.
    """

    def __init__(self, disk: DiskStore, remote: RemoteTier, agreement: Agreement) -> None:
        self._disk, self._remote, self._agreement = disk, remote, agreement
        self._threads = ThreadPoolExecutor(UPLOADS, "blendrag-upload")
        self._room = threading.BoundedSemaphore(QUEUED_UPLOADS)
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, str], Future[None]] = {}
        self._owed: dict[tuple[str, str], _Owed] = {}
        self._known: dict[tuple[str, str], None] = {}

    @property
    def are_behind(self) -> bool:
        """Whether there is no room for another one."""
        return len(self._under_way) >= QUEUED_UPLOADS

    def offer(self, namespace: str, key: str, is_missing: bool = False, waits: bool = True) -> bool:
        """Copy an entry unless it is known to be there; ``False`` if it is not on the local disk.

        ``is_missing``: it was looked for there and not found. ``waits``: until there is room; otherwise the
        entry is copied by the next :meth:`flush`.
        """
        entry = namespace, key
        with self._lock:
            if is_missing:
                self._known.pop(entry, None)
            if entry in self._known and not self._remote.is_doubtful(*entry):
                return True
            owed = self._owed.setdefault(entry, _Owed())
            owed.threads.add(threading.current_thread())
            if len(self._owed) > REMEMBERED:
                del self._owed[next(iter(self._owed))]
            if entry in self._under_way:
                return True
        payload = self._disk.payload(namespace, key)
        if payload is None:
            with self._lock:
                owed.failure = ""
                owed.threads.discard(threading.current_thread())
            return False
        if not self._room.acquire(blocking=waits):
            owed.failure = "too many chunks wait to be copied"
            return True
        files = contextlib.ExitStack()
        try:
            found = files.enter_context(payload)
            with self._lock:
                run = partial(self._run, entry, files, *found)
                self._under_way[entry] = self._threads.submit(run)
        except BaseException as exc:
            files.close()
            self._room.release()
            owed.failure = str(exc) or type(exc).__name__
            if not isinstance(exc, OSError | StoreError | RuntimeError):
                raise
        return True

    def note_known(self, namespace: str, key: str) -> None:
        """An entry is in the remote."""
        with self._lock:
            self._known[namespace, key] = None
            self._owed.pop((namespace, key), None)
            if len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]

    def forget_known(self, namespace: str, keys: Iterable[str]) -> None:
        """Entries are not in the remote any more."""
        with self._lock:
            for key in keys:
                self._known.pop((namespace, key), None)

    def _run(
        self,
        entry: tuple[str, str],
        files: contextlib.ExitStack,
        header: PayloadHeader,
        read: Read,
    ) -> None:
        try:
            with files:
                if not self._agreement.reach(entry[0]):
                    raise StoreUnavailableError(
                        self._remote.trouble or "its probe could not be compared yet"
                    )
                self._remote.put(header, read)
            self.note_known(*entry)
        except Exception as exc:
            with self._lock:
                owed = self._owed.pop(entry, _Owed())
                owed.failure = str(exc) or type(exc).__name__
                self._owed[entry] = owed  # at the end, so that others are tried again first
            logger.info("a chunk was not copied to the remote: %s", exc)
        finally:
            self._room.release()
            with self._lock:
                self._under_way.pop(entry, None)
                is_copied = entry in self._known
        if is_copied:
            self.try_again()

    def try_again(self) -> None:
        """Offer some of what failed earlier; each that is copied is followed by more."""
        with self._lock:
            failed = list(
                islice((each for each, owed in self._owed.items() if owed.failure), TRIED_AGAIN)
            )
        for entry in failed:
            self.offer(*entry, waits=False)

    def flush(self) -> None:
        """Block until all that this thread offered is durable there; what failed is tried once more.

        Raises :class:`StoreUnavailableError` if it is not.
        """
        with self._lock:
            me = threading.current_thread()
            mine = [entry for entry, owed in self._owed.items() if me in owed.threads]
        gone = {entry for entry in mine if not self.offer(*entry)}
        with self._lock:
            under_way = [self._under_way[entry] for entry in mine if entry in self._under_way]
        wait(under_way)
        with self._lock:
            failed = [entry for entry in mine if entry in self._owed and entry not in gone]
            left = [self._owed[entry].failure for entry in failed]
        left += ["they were evicted before they were copied"] * len(gone)
        if left:
            raise StoreUnavailableError(
                f"{len(left)} chunks were not copied to remote {self._remote.url} ({left[0]}); run this "
                "again when the remote works"
            )

    def close(self) -> None:
        """Finish what is under way, and what waits if that takes no longer than one copy may."""
        with self._lock:
            under_way = list(self._under_way.values())
        wait(under_way, WRITE_S)
        self._threads.shutdown(cancel_futures=True)
