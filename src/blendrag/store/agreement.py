"""Checks that the remote's KV is what this machine computes.

Machines with different kernels or library versions may share one remote. So each namespace there has a
probe: the KV of a few tokens, put before any other KV and never replaced. Until this machine has compared it,
the remote's KV of that namespace counts as absent, and none is copied there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from blendrag.errors import InvalidInputError, StoreError, StoreUnavailableError
from blendrag.store.base import KVReader
from blendrag.store.disk import DiskStore
from blendrag.store.kv import ChunkKV, KVLayout
from blendrag.store.payload import verified_pieces
from blendrag.store.remote import RemoteReader, RemoteTier

logger = logging.getLogger("blendrag.store")

#: Seconds until a remote that gave no probe is asked for it again.
AGAIN_S = 10.0


class ForeignKVError(StoreUnavailableError):
    """The remote's KV of this model is not, or cannot be shown to be, what this machine computes."""


@dataclass(frozen=True)
class Probe:
    """The entry that is compared."""

    key: str
    layout: KVLayout
    tokens: int
    compute: Callable[[], ChunkKV]
    """By the loaded model, as it would be put."""
    is_alike: Callable[[KVReader], bool]
    """Whether the model computes that KV, up to rounding. Raises :class:`CorruptKVError`."""


class Agreement:
    """Which namespaces of the remote may be used. Thread-safe: two threads may compare the same one."""

    def __init__(self, disk: DiskStore, remote: RemoteTier) -> None:
        self._disk, self._remote = disk, remote
        self._agreed: set[str] = set()
        self._foreign: dict[str, str] = {}
        self._again_at: dict[tuple[str, bool], float] = {}

    def __contains__(self, namespace: str) -> bool:
        return namespace in self._agreed

    def reach(
        self, namespace: str, probe: Callable[[], Probe] | None = None, create: bool = False
    ) -> bool:
        """Whether that namespace may be used; compares its probe the first time.

        ``probe`` needs the loaded model. Without it, the remote's probe is compared with the copy on the
        local disk. ``create``: put a probe into an empty namespace. ``False`` if the remote has no probe or
        does not answer. Raises :class:`ForeignKVError` for KV that this machine does not compute.
        """
        if namespace in self._agreed:
            return True
        if namespace in self._foreign:
            raise ForeignKVError(self._foreign[namespace])
        asked = namespace, probe is not None
        is_early = time.monotonic() < self._again_at.get(asked, 0.0) and not create
        if is_early or self._remote.trouble:
            return False
        try:
            self._remote.check()
            if probe is None:
                is_same = self._is_copied(namespace)
            else:
                is_same = self._is_alike(namespace, probe(), create)
        except (
            InvalidInputError
        ) as exc:  # it was down when it was opened, and is no remote for this store
            raise self._refuse(namespace, str(exc)) from exc
        except ForeignKVError:
            raise
        except StoreError as exc:
            logger.info("the probe of remote %s was not compared: %s", self._remote.url, exc)
            is_same = False
        if is_same:
            self._agreed.add(namespace)
        self._again_at[asked] = time.monotonic() + AGAIN_S
        return is_same

    def _is_alike(self, namespace: str, probe: Probe, create: bool) -> bool:
        entry = namespace, probe.key, probe.layout, probe.tokens
        self._remote.forget_doubt(namespace, probe.key)
        reader = self._remote.peek(*entry)
        if reader is None and create and self._create(namespace, probe):
            reader = self._remote.peek(*entry)
        if reader is None:
            return False
        try:
            layers = reader.whole(self._remote.timeout_s)
            if not probe.is_alike(reader):
                raise self._refuse(
                    namespace,
                    f"remote {self._remote.url} holds KV of this model that it does not compute on this "
                    "machine, expected the same; use the versions of blendrag, torch and transformers that "
                    "filled it, or another prefix",
                )
            if not self._disk.read_only:
                self._keep(namespace, probe.key, reader, layers)
        finally:
            reader.release()
        return True

    def _keep(
        self, namespace: str, key: str, reader: RemoteReader, layers: list[memoryview]
    ) -> None:
        """Copy the probe to the local disk, for :meth:`_is_copied`."""
        try:
            self._disk.put_stored(namespace, key, reader.frame, reader.checksums, layers)
            self._disk.pin(namespace, key)
        except StoreError as exc:
            logger.info("the probe of remote %s was not kept: %s", self._remote.url, exc)

    def _create(self, namespace: str, probe: Probe) -> bool:
        """Put the probe if the namespace is empty. Another machine may put its own first."""
        if self._remote.is_doubtful(namespace, probe.key):
            return False
        is_empty = next(self._remote.keys(namespace), None) is None
        if self._remote.trouble:
            return False
        if not is_empty:
            raise self._refuse(
                namespace,
                f"remote {self._remote.url} holds KV of namespace {namespace[:12]} without the probe by "
                "which it is compared, so it cannot be used; remove it (blendrag store clear --remote URL "
                f"--namespace {namespace[:12]}), or choose another prefix",
            )
        self._disk.put(namespace, probe.key, probe.compute())
        self._disk.pin(namespace, probe.key)
        payload = self._disk.payload(namespace, probe.key)
        if payload is None:
            return False
        with payload as found:
            self._remote.put(*found)
        return True

    def _is_copied(self, namespace: str) -> bool:
        """Whether a pinned entry, such as the probe, is in the remote with the same bytes."""
        for key in self._disk.pinned(namespace):
            payload = self._disk.payload(namespace, key)
            if payload is None:
                continue
            with payload as (header, read):
                here = b"".join(verified_pieces(header, read))
            reader = self._remote.peek(namespace, key, header.layout, header.tokens)
            if reader is None:
                continue
            try:
                if here == b"".join(reader.whole(self._remote.timeout_s)):
                    return True
            finally:
                reader.release()
        return False

    def _refuse(self, namespace: str, why: str) -> ForeignKVError:
        self._foreign[namespace] = why
        logger.warning("KV of the remote is not used: %s", why)
        return ForeignKVError(why)
