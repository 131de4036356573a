"""What a published corpus is in an object store: immutable snapshots, and a pointer to the current one.

Layout below the URL of the remote (:mod:`blendrag.store.remote.root`)::

    corpus/pointer              names the current snapshot, with a seal; the only object that changes
    corpus/manifests/<sha256>   a snapshot: settings of the corpus, its parts, and which KV it names
    corpus/parts/<sha256>       some documents with their chunks and vectors, a list of keys, or a writer
    corpus/gc                   there while garbage is collected (:mod:`blendrag.store.remote.claims`)

How they are written and followed is in :mod:`blendrag.corpus.shared.sharing`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError

from blendrag.config import Settings
from blendrag.corpus.manifest import Manifest
from blendrag.errors import InvalidInputError, StoreUnavailableError
from blendrag.store.remote.objects import WRITE_S, Stored
from blendrag.store.remote.root import RemoteRoot

VERSION = 1
#: Attempts to renew the pointer while others publish.
RENEWALS = 5
POINTER = "corpus/pointer"
MANIFESTS, PARTS = "corpus/manifests/", "corpus/parts/"


#: Most that is read of a manifest or a part.
MAX_BLOB_BYTES = 1 << 30


@dataclass(frozen=True)
class SnapshotPart:
    name: str
    """SHA-256 of the object."""
    state: str
    """Digest of the sources and digests of its documents."""
    size_bytes: int
    """Decompressed."""


@dataclass(frozen=True)
class Snapshot:
    """What a manifest says. Equal corpora with equal KV have equal manifests."""

    corpus: str
    """Random id, made when the corpus is published for the first time."""
    settings: Manifest
    documents: int
    chunks: int
    state: str
    """Digest of the documents and of the settings that they depend on."""
    parts: tuple[SnapshotPart, ...]
    namespace: str
    keys: str
    """Name of the part that lists the keys of its KV, 32 bytes each."""
    writer: str = ""
    """Name of the part that holds the writer of its KV; empty if there is none."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @property
    def part_names(self) -> set[str]:
        """All objects below ``corpus/parts/`` that it needs."""
        names = {part.name for part in self.parts} | {self.keys}
        return names | {self.writer} if self.writer else names


@dataclass(frozen=True)
class Pointer:
    """Which snapshot is current."""

    version: int
    corpus: str
    serial: int
    """Grows by one with every snapshot."""
    snapshot: str
    seal: str = ""

    def signed(self, remote: RemoteRoot) -> str:
        fields = {name: value for name, value in asdict(self).items() if name != "seal"}
        return remote.seals.of_snapshot(json.dumps(fields, sort_keys=True).encode())


def remote_root(settings: Settings) -> RemoteRoot:
    """The remote of these settings, with time for large objects. Raises :class:`InvalidInputError`."""
    if settings.remote is None:
        raise InvalidInputError(
            "no remote was named, expected s3://bucket/prefix, gs://…, az://… or file:///directory; add "
            "--remote, or remote=… to the engine"
        )
    secret = settings.remote_key
    return RemoteRoot(settings.remote, secret, WRITE_S)


def current(remote: RemoteRoot) -> tuple[Pointer, Snapshot] | None:
    """The published snapshot, ``None`` if there is none."""
    found = remote.objects.get(POINTER)
    if found is None:
        return None
    pointer = read_pointer(remote, found)
    return pointer, read_manifest(remote, pointer.snapshot)


def read_pointer(remote: RemoteRoot, found: Stored) -> Pointer:
    """Raises :class:`InvalidInputError` for a pointer that nobody with the key has written."""
    try:
        pointer = _POINTER.validate_json(found.data)
    except ValidationError as exc:
        raise InvalidInputError(
            f"remote {remote.url} holds a file {POINTER!r} that this version of blendrag did not write; use "
            "the version that published it, or choose another prefix"
        ) from exc
    if not hmac.compare_digest(pointer.seal.encode(), pointer.signed(remote).encode()):
        raise InvalidInputError(
            f"the corpus of remote {remote.url} was not published by somebody with this "
            "BLENDRAG_REMOTE_KEY, so it is not used; publish it again from a machine that has the key"
        )
    return pointer


def renew_pointer(remote: RemoteRoot) -> Pointer:
    """Replace the pointer by an equal one, so that a machine that has read it before does not replace it.

    Raises :class:`StoreUnavailableError`.
    """
    for _ in range(RENEWALS):
        found = remote.objects.get(POINTER)
        if found is None:
            break
        pointer = read_pointer(remote, found)
        unlike = {"renewed": secrets.token_hex(8)}  # not sealed, and read by nobody
        if remote.objects.replace(POINTER, json.dumps(asdict(pointer) | unlike).encode(), found):
            return pointer
    raise StoreUnavailableError(
        f"remote {remote.url} is being published to; repeat the command when that has ended"
    )


def read_manifest(remote: RemoteRoot, name: str) -> Snapshot:
    """Raises :class:`StoreUnavailableError` if it is not what was written."""
    data = read_blob(remote, MANIFESTS, name)
    try:
        return _SNAPSHOT.validate_json(data)
    except ValidationError as exc:
        raise StoreUnavailableError(
            f"the snapshot {name[:12]}… of remote {remote.url} is not what this version of blendrag writes; "
            "use the version that published it"
        ) from exc


def read_keys(remote: RemoteRoot, snapshot: Snapshot) -> frozenset[str]:
    """Keys of the KV that a snapshot names."""
    data = read_blob(remote, PARTS, snapshot.keys)
    return frozenset(data[at : at + 32].hex() for at in range(0, len(data), 32))


def read_blob(remote: RemoteRoot, folder: str, name: str) -> bytes:
    """An object that is named by its contents; read again once if they differ.

    Raises :class:`StoreUnavailableError`.
    """
    for _ in range(2):
        found = remote.objects.get(folder + name, MAX_BLOB_BYTES)
        if found is not None and hashlib.sha256(found.data).hexdigest() == name:
            return found.data
    what = "is missing" if found is None else "is not what was published"
    raise StoreUnavailableError(
        f"{folder}{name[:12]}… of remote {remote.url} {what}; repeat the command, and if that does not help, "
        "publish everything again (blendrag store publish --again)"
    )


_POINTER = TypeAdapter(Pointer)
_SNAPSHOT = TypeAdapter(Snapshot)
