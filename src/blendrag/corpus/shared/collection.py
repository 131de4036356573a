"""Remove from a remote what no snapshot names any more: KV, parts and manifests.

Safe beside machines that publish, ingest and read:

- What was written or claimed (:mod:`blendrag.store.remote.claims`) less than a grace period ago stays, so
  that an ingest that has not published yet keeps its KV. All times are by the clock of the store.
- A mark tells publishers that a collection runs. A publisher writes its manifest, then looks for the mark,
  then for its KV. So a collection reads that manifest, or the publisher sees the mark and stops, or it sees
  what the collection has removed.
- A collection begins by writing the pointer anew, so that who has read it before cannot replace it any more:
  a publisher that is slow, or was stopped, may have found what is removed now.
- A machine that reads what is removed gets a miss, and computes.
- A collection ends with an error if the clock of the store is not that of this machine, or was set back
  meanwhile. In a directory, what a wrong clock has dated in the future is dated anew, or it would stay for
  years.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from blendrag.corpus.shared import snapshots
from blendrag.errors import InvalidInputError, StoreUnavailableError
from blendrag.store.identity import probe_key
from blendrag.store.remote.claims import (
    AHEAD_S,
    CLAIMS,
    CLOCK,
    MARK,
    STALE_MARK_S,
    claimed,
    mark_age_s,
    require_no_collection,
    time_there,
)
from blendrag.store.remote.directory import Listed
from blendrag.store.remote.root import RemoteRoot, entry_of

T = TypeVar("T")

#: Objects removed at a time, each time after a look at the mark.
BATCH = 500
#: Seconds after which the mark is renewed.
RENEW_S = 60.0
#: After so long without renewal, this process was stopped, and others may take the mark for a stale one.
LATEST_RENEWAL_S = STALE_MARK_S / 2
#: Largest difference between this machine's clock and the store's.
MOST_SKEW_S = 3600.0


@dataclass(frozen=True)
class Collected:
    """What :func:`collect_remote` removed and left."""

    serial: int
    """Number of the current snapshot."""
    removed: int
    """Objects of KV."""
    removed_bytes: int
    """Bytes of KV, parts, manifests and claims."""
    left: int
    left_bytes: int
    """Bytes of KV in the namespaces that snapshots name."""
    young: int
    """Objects left that the current snapshot does not name: they, or a snapshot or claim that
    names them, were written within the grace period."""
    other_namespaces: tuple[str, ...]
    """Those of no snapshot: other models, other ways to load them, prompt schemas. They are left alone."""


def collect_remote(remote: RemoteRoot, grace_s: float) -> Collected:
    """Remove what no snapshot names and what is older than ``grace_s``.

    Raises :class:`InvalidInputError` if nothing is published, and :class:`StoreUnavailableError`.
    """
    remote.check()
    if snapshots.current(remote) is None:
        raise InvalidInputError(
            f"remote {remote.url} has no published corpus, so it is not known which KV is needed; publish "
            "first (blendrag store publish)"
        )
    require_no_collection(remote)
    mark = _Mark(remote)
    try:
        now = mark.now()
        before = now - grace_s
        pointer = snapshots.renew_pointer(remote)
        snapshot = snapshots.read_manifest(remote, pointer.snapshot)
        listed = list(remote.objects.listing("corpus/"))
        live, old_manifests = [snapshot], []
        for each in mark.kept_for(listed):
            name = each.name.removeprefix(snapshots.MANIFESTS)
            if each.name.startswith(snapshots.MANIFESTS) and name != pointer.snapshot:
                if each.modified >= before:
                    live.append(snapshots.read_manifest(remote, name))
                else:
                    old_manifests.append(each)
        claims = list(remote.objects.listing(CLAIMS))
        old_claims = [each for each in claims if each.modified < before]
        named = _named(remote, mark.kept_for(live))
        counted = [each for each in claims if each.modified >= before]
        for namespace, keys in claimed(remote, mark.kept_for(counted)).items():
            if namespace in named:
                named[namespace] |= keys
        needed = {(snapshot.namespace, key) for key in snapshots.read_keys(remote, snapshot)}
        parts = {name for one in live for name in one.part_names}
        unused = [
            each
            for each in listed
            if each.name.startswith((snapshots.PARTS, CLOCK))
            and each.name.removeprefix(snapshots.PARTS) not in parts
            and each.modified < before
        ]
        kv, left, left_bytes, young, others = [], 0, 0, 0, set()
        future = [each for each in (*listed, *claims) if each.modified > now + AHEAD_S]
        for each in mark.kept_for(remote.objects.listing("kv/")):
            namespace, key = entry_of(each.name)
            future += [each] * (each.modified > now + AHEAD_S)
            if namespace not in named:
                others.add(namespace)
            elif key in named[namespace] or not key or each.modified >= before:
                left, left_bytes = left + 1, left_bytes + each.size_bytes
                young += bool(key) and (namespace, key) not in needed
            else:
                kv.append(each)
        # a manifest goes first, so that none is left that names what is gone
        gone = [*old_manifests, *old_claims, *unused, *kv]
        for batch in _batches(gone):
            mark.renew()
            remote.objects.delete(*(each.name for each in batch))
        for each in mark.kept_for(future):
            remote.objects.redate(each.name)
        unfinished_bytes = remote.objects.remove_unfinished(before)
    finally:
        mark.remove()
    removed_bytes = sum(each.size_bytes for each in gone) + unfinished_bytes
    other = tuple(sorted(others - {""}))
    return Collected(pointer.serial, len(kv), removed_bytes, left, left_bytes, young, other)


def clear_remote(
    remote: RemoteRoot, namespace: str, confirm: Callable[[str, int, int], bool]
) -> tuple[int, int] | None:
    """Remove all KV of one namespace, which may be given by its beginning; objects and bytes removed.

    ``confirm`` is asked with the namespace, objects and bytes; ``None`` if it declines. Raises
    :class:`InvalidInputError` for an unknown namespace and for one that the published corpus needs.
    """
    remote.check()
    found = [e for e in remote.objects.listing("kv/") if entry_of(e.name)[0].startswith(namespace)]
    names = sorted({entry_of(each.name)[0] for each in found})
    if len(names) != 1 or not namespace:
        raise InvalidInputError(
            f"{len(names)} namespaces in remote {remote.url} begin with {namespace!r:.80}, expected one; "
            "blendrag store gc --remote URL --json lists those of no published corpus"
        )
    published = snapshots.current(remote)
    if published is not None and published[1].namespace == names[0]:
        raise InvalidInputError(
            f"namespace {names[0][:12]}… of remote {remote.url} is that of the published corpus; remove "
            "documents and publish again, or remove the prefix with the tools of the object store"
        )
    size_bytes = sum(each.size_bytes for each in found)
    if not confirm(names[0], len(found), size_bytes):
        return None
    for batch in _batches(found):
        remote.objects.delete(*(each.name for each in batch))
    return len(found), size_bytes


def _named(remote: RemoteRoot, live: Iterable[snapshots.Snapshot]) -> dict[str, set[str]]:
    """Keys by namespace, with that of its probe."""
    named: dict[str, set[str]] = {}
    for snapshot in live:
        keys = named.setdefault(snapshot.namespace, {probe_key(snapshot.namespace)})
        keys.update(snapshots.read_keys(remote, snapshot))
    return named


def _batches(objects: list[Listed]) -> Iterator[list[Listed]]:
    yield from (objects[at : at + BATCH] for at in range(0, len(objects), BATCH))


class _Mark:
    """Tells publishers and other collections that this one runs."""

    def __init__(self, remote: RemoteRoot) -> None:
        self._remote = remote
        self._token = secrets.token_hex(16).encode()
        self._latest = 0.0
        self._set()

    def now(self) -> float:
        """Unix time by the clock of the store.

        Raises :class:`StoreUnavailableError` if it, or that of this machine, cannot be right: by a wrong
        clock everything may be old.
        """
        now = time_there(self._remote)
        if abs(now - time.time()) > MOST_SKEW_S or now < self._latest - AHEAD_S:
            store_time, local_time = (
                f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}" for at in (now, time.time())
            )
            raise StoreUnavailableError(
                f"the clock of remote {self._remote.url} says {store_time} UTC and this machine's "
                f"{local_time}, or one was set meanwhile, so the age of objects is not known; set the "
                "clocks, then repeat the command"
            )
        self._latest = max(now, self._latest)
        return now

    def kept_for(self, each: Iterable[T]) -> Iterator[T]:
        """``each``, renewing the mark when it is time to."""
        for one in each:
            if time.monotonic() - self._set_at >= RENEW_S:
                self.renew()
            yield one

    def renew(self) -> None:
        """Set the mark again. Raises :class:`StoreUnavailableError` if it may have been ignored meanwhile."""
        if not self._is_there():
            raise StoreUnavailableError(
                f"remote {self._remote.url} is being collected by another machine too; what was removed was "
                "not needed: repeat the command when that has ended"
            )
        age_s = mark_age_s(self._remote)
        if age_s is None or age_s > LATEST_RENEWAL_S:
            raise StoreUnavailableError(
                f"the collection of remote {self._remote.url} was stopped for too long, so others did not "
                "wait for it; what was removed was not needed: repeat the command"
            )
        self.now()
        self._set()

    def remove(self) -> None:
        if self._is_there():
            self._remote.objects.delete(MARK)

    def _set(self) -> None:
        self._set_at = time.monotonic()
        self._remote.objects.put(MARK, self._token, if_absent=False)

    def _is_there(self) -> bool:
        found = self._remote.objects.get(MARK)
        return found is not None and found.data == self._token
