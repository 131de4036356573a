"""Claims: KV of a remote that an ingest has found or written and that the next snapshot will name.

A collection (:mod:`blendrag.corpus.shared.collection`) removes what is old and named by no snapshot. KV that
an ingest finds may be both, so the ingest claims it when it ends. A claim keeps KV as long as writing it
anew::

    claims/<sha256>-<random>    namespace and keys, 32 bytes each

An ingest writes its claim, then looks for the mark of a collection, then for the KV. A collection sets its
mark, then reads the claims. So it reads the claim, or the ingest sees the mark, or what was removed.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence

from blendrag.errors import StoreUnavailableError
from blendrag.store.remote.directory import Listed
from blendrag.store.remote.root import RemoteRoot

CLAIMS = "claims/"
#: There while garbage is collected.
MARK = "corpus/gc"
#: Objects by which the clock of the store is read.
CLOCK = "corpus/clock/"
#: Age by the clock of the store; an older mark was left by a collection that was killed.
STALE_MARK_S = 3600.0
#: How far the time of an object may be ahead of the clock, if the clock is right.
AHEAD_S = 60.0
_NAME_BYTES = 32
#: Keys in one claim.
CLAIM_KEYS = 100_000


def claim(remote: RemoteRoot, namespace: str, keys: Sequence[str]) -> None:
    """Keep KV from being collected. Raises :class:`StoreUnavailableError`, also while a collection runs."""
    for at in range(0, len(keys), CLAIM_KEYS):
        names = (namespace, *keys[at : at + CLAIM_KEYS])
        data = b"".join(bytes.fromhex(name) for name in names)
        name = f"{CLAIMS}{hashlib.sha256(data).hexdigest()}-{secrets.token_hex(8)}"
        remote.objects.put(name, data, if_absent=False)
    require_no_collection(remote)


def claimed(remote: RemoteRoot, claims: Iterable[Listed]) -> dict[str, set[str]]:
    """Claimed keys by namespace. Raises :class:`StoreUnavailableError` for a claim that cannot be read."""
    found: dict[str, set[str]] = {}
    for each in claims:
        stored = remote.objects.get(each.name, (CLAIM_KEYS + 1) * _NAME_BYTES)
        data = b"" if stored is None else stored.data
        if hashlib.sha256(data).hexdigest() != each.name.removeprefix(CLAIMS).partition("-")[0]:
            raise StoreUnavailableError(
                f"{each.name[:20]}… of remote {remote.url} is not what an ingest wrote; repeat the command, "
                "and remove that object if that does not help"
            )
        namespace, *keys = (
            data[at : at + _NAME_BYTES].hex() for at in range(0, len(data), _NAME_BYTES)
        )
        found.setdefault(namespace, set()).update(keys)
    return found


def require_no_collection(remote: RemoteRoot) -> None:
    """Raise :class:`StoreUnavailableError` while garbage is collected, perhaps what is named next."""
    age_s = mark_age_s(remote)
    if age_s is not None and age_s < STALE_MARK_S:
        raise StoreUnavailableError(
            f"remote {remote.url} is being collected (blendrag store gc --remote); repeat the command when "
            "that has ended"
        )


def mark_age_s(remote: RemoteRoot) -> float | None:
    """Seconds since the mark of a collection was set, by the clock of the store; ``None`` without one.

    A mark of a later time was set before that clock was set back. It is written anew, or it would never
    become stale.
    """
    found = remote.objects.get(MARK)
    if found is None:
        return None
    marks = [each for each in remote.objects.listing("corpus/") if each.name == MARK]
    if not marks:
        return None
    age_s = time_there(remote) - marks[0].modified
    if age_s < -AHEAD_S:
        remote.objects.replace(MARK, found.data, found)  # unless the collection has renewed it
    return max(0.0, age_s)


def time_there(remote: RemoteRoot) -> float:
    """Unix time by the clock of the store, which this machine's may differ from."""
    name = f"{CLOCK}{secrets.token_hex(8)}"
    remote.objects.put(name, b"now", if_absent=False)
    try:
        return next(each.modified for each in remote.objects.listing(CLOCK) if each.name == name)
    except StopIteration:
        raise StoreUnavailableError(
            f"remote {remote.url} does not list an object that was just written; repeat the command"
        ) from None
    finally:
        remote.objects.delete(name)
