"""Copies KV from the local disk to a remote, in the background."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from blendrag.errors import (
    StoreError,
    StoreUnavailableError,
)
from blendrag.store.disk import DiskStore
from blendrag.store.payload import PayloadHeader, Read
from blendrag.store.remote.agreement import Agreement
from blendrag.store.remote.objects import WRITE_S
from blendrag.store.remote.tier import RemoteTier

logger = logging.getLogger("blendrag.store")

#: Copies at a time, and how many chunks may wait for one.
UPLOADS, QUEUED_UPLOADS = 4, 32
#: Chunks that are remembered: as known to be in the remote, so that it is not asked again, and as not copied.
REMEMBERED = 1 << 16
#: Chunks that are tried again at a time.
TRIED_AGAIN = 2


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
