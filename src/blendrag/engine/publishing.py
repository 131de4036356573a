"""Sharing a corpus through the remote: publish it after an ingest, follow it elsewhere.

How it is written and read is in :mod:`blendrag.corpus.shared.sharing`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path

from blendrag.config import Settings
from blendrag.corpus.manifest import Manifest
from blendrag.corpus.shared import sharing
from blendrag.corpus.shared.sharing import Followed, Keys, Published
from blendrag.corpus.shared.snapshots import remote_root
from blendrag.engine.kv_namespace import KVNamespace
from blendrag.errors import starting_thread
from blendrag.store.identity import chunk_keys, is_name, probe_key
from blendrag.store.remote.root import RemoteRoot

log = logging.getLogger(__name__)

#: How often a server looks for a new snapshot.
FOLLOW_EVERY_S = 10.0


def publish(kv: KVNamespace, again: bool = False) -> Published:
    """See :meth:`BlendEngine.publish`."""
    with remote_root(kv.settings) as remote:
        named = kv.corpus.require().manifest.namespace
        store = kv.store
        is_compared = not is_name(named) or store.read_only or store.agrees(named) or store.trouble
        if not is_compared and kv.validity.namespace == named:
            kv.validity.admit(named)

        def keys_of(manifest: Manifest, texts: Iterable[str]) -> Keys:
            namespace = manifest.namespace
            if not is_name(namespace):  # of a model whose KV cannot be reused
                return Keys("", frozenset())
            prefix, ids_of = manifest.prefix_ids, kv.model.text_ids
            exact = manifest.recipe.is_exact
            keys = {key for t in texts for key in chunk_keys(namespace, prefix, ids_of(t), exact)}
            probes = store.disk.pinned(namespace) | {probe_key(namespace)}
            return Keys(namespace, frozenset(keys | probes))

        def durable(keys: Keys) -> frozenset[str]:
            return store.ensure_remote(*keys) if keys.keys else frozenset()

        return sharing.publish(kv.root, remote, keys_of, durable, again)


def follow(root: Path, settings: Settings, keep_settings: bool = False) -> Followed | None:
    """Make the corpus of the store at ``root`` equal to the one that the remote of ``settings`` publishes.

    ``None`` if it publishes none. Loads no model. An engine over the store answers from the new corpus as
    soon as this returns; its running requests go on. See :func:`blendrag.corpus.shared.sharing.follow`.
    """
    with remote_root(settings) as remote:
        return sharing.follow(root, remote, keep_settings)


class Follower:
    """Follows the published corpus in a background thread until it is closed."""

    def __init__(self, kv: KVNamespace, every_s: float | None = None) -> None:
        """Starts the thread. ``kv``: those of the engine whose store follows."""
        self._kv = kv
        self._every_s = FOLLOW_EVERY_S if every_s is None else every_s
        self._over = threading.Event()
        self._remote: RemoteRoot | None = None
        self._lock = threading.Lock()
        self._told = ""
        self._thread = threading.Thread(target=self._run, name="blendrag-follow", daemon=True)
        with starting_thread():
            self._thread.start()

    def close(self) -> None:
        """Stop following: requests are cancelled, a transaction that has begun is finished. Idempotent."""
        self._over.set()
        with self._lock:
            if self._remote is not None:
                self._remote.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                followed = self._follow()
                self._told = ""
                if followed is not None and followed.changed:
                    log.info("followed to snapshot %d of the corpus", followed.serial)
                    self._kv.drop_orphaned()
            except Exception as error:  # such as a full disk: the thread goes on
                if str(error) != self._told and not self._over.is_set():
                    log.warning("the published corpus is not followed: %s", error)
                self._told = str(error)

    def _follow(self) -> Followed | None:
        with self._lock:
            if self._over.is_set():
                return None
            self._remote = remote_root(self._kv.settings)
        with self._remote as remote:
            return sharing.follow(self._kv.root, remote, keep_settings=True)
