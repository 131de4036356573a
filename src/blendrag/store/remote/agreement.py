"""Whether the KV of a remote is what this machine computes.

Machines with different kernels or library versions may share one remote. So each namespace there has a
probe: the KV of a few tokens, put before any other KV and never replaced. Until this machine has compared it,
the remote's KV of that namespace counts as absent.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from blendrag.errors import (
    CorruptKVError,
    InvalidInputError,
    StoreError,
)
from blendrag.store.base import ForeignKVError, Probe
from blendrag.store.disk import DiskStore
from blendrag.store.identity import probe_key
from blendrag.store.payload import PayloadHeader, verified_pieces
from blendrag.store.remote.tier import RemoteReader, RemoteTier

logger = logging.getLogger("blendrag.store")

#: Seconds until a remote that gave no probe is asked for it again.
AGAIN_S = 10.0


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
