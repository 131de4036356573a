"""Computing KV for the store: for an ingest run, and for what queries missed.

Both go through :class:`Trust`, so nothing is stored under another model's name. Chunks a query missed
are encoded alone, as KV computed in the context of a query is never written back: after the answer, when
nobody asks anything; and before it where others wait, who would otherwise wait for two computations of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from blendrag.engine.resources import Resources
from blendrag.engine.worker import Worker
from blendrag.errors import BlendragError, StoreFullError
from blendrag.planning.plan import Plan
from blendrag.store.identity import chunk_key
from blendrag.store.kv import ChunkKV

log = logging.getLogger(__name__)

#: Leading parts remembered as seen once; a part is worth an entry when it comes back.
SEEN_LEADING = 1024
#: Chunks that may wait to be encoded; what else is missed meanwhile waits until it is missed again.
QUEUED_CHUNKS = 256

Ids = tuple[int, ...]


class Encoder:
    """Encodes chunks for one ingest run; loads the model only when there is something to encode."""

    def __init__(self, resources: Resources, worker: Worker) -> None:
        self._resources = resources
        self._worker = worker
        self._namespace = ""
        self._admitted = False

    @property
    def namespace(self) -> str:
        """Where this run stores; fixed for the run."""
        if not self._namespace:
            self._namespace = self._resources.namespace()
            if self._resources.is_loaded:
                self._worker.run(lambda: self._resources.kv_validity.renew(self._namespace))
        return self._namespace

    def chunk_ids(self, texts: Sequence[str]) -> list[Ids]:
        return [self._resources.text_ids(text) for text in texts]

    def encode(self, ids: Sequence[int]) -> ChunkKV:
        """KV of ``ids``; :class:`IdentityChangedError` when the files hold other weights than the
        corpus remembers, or weights change during the run."""
        return self._worker.run(lambda: self._encode(ids))

    def _encode(self, ids: Sequence[int]) -> ChunkKV:
        trust, namespace = self._resources.kv_validity, self.namespace
        if not self._admitted:
            trust.admit(namespace)
            self._admitted = True
        return trust.encode(namespace, ids, self._resources.prefix_ids)


class Background:
    """Encodes what queries missed, on the worker: in between requests, or ahead of a busy one."""

    def __init__(self, resources: Resources, worker: Worker) -> None:
        self._resources = resources
        self._worker = worker
        self._queued: set[tuple[Ids, Ids]] = set()
        self._seen: dict[Ids, None] = {}
        self._full = False

    def note(self, plan: Plan) -> None:
        """Queue the chunks that had no KV, and a leading part that was met before."""
        if self._full or not self._resources.is_writable:
            return
        prefix = self._resources.prefix_ids
        wanted = [(ids, prefix) for ids in plan.missing]
        if plan.leading and self._met_before(plan.leading):
            wanted.append((plan.leading, ()))
        for ids, behind in wanted:
            if len(self._queued) >= QUEUED_CHUNKS:
                log.info("%d chunks wait to be encoded: others are not queued", QUEUED_CHUNKS)
                return
            if (ids, behind) not in self._queued:
                self._queued.add((ids, behind))
                self._worker.submit(partial(self._encode, ids, behind), background=True)

    @property
    def goes_first(self) -> bool:
        """Whether a request's missing chunks are better encoded before it: others wait behind it already,
        so that there may be no time in between."""
        return self._worker.is_waited_for and not self._full and self._resources.is_writable

    def encode_first(self, missing: Sequence[Ids], check: Callable[[], None]) -> int:
        """Encode chunks that a request is about to miss, on the worker; how many of them are stored now.

        ``check`` is called before each, and raises for a request that is over.
        """
        stored = 0
        for ids in missing:
            check()
            stored += self._encode(ids, self._resources.prefix_ids)
            if self._full:
                break
        return stored

    def _met_before(self, leading: Ids) -> bool:
        if leading in self._seen:
            return True
        self._seen[leading] = None
        while len(self._seen) > SEEN_LEADING:
            del self._seen[next(iter(self._seen))]
        return False

    def _encode(self, ids: Ids, prefix: Ids) -> bool:
        """Whether they are stored now."""
        resources = self._resources
        try:
            with resources.adapter.lock:  # one identity from the look-up to the put
                namespace = resources.kv_validity.namespace
                key = chunk_key(namespace, prefix, ids)
                if not resources.store.contains(namespace, key):
                    resources.kv_validity.admit(namespace)
                    kv = resources.kv_validity.encode(namespace, ids, prefix)
                    resources.store.put(namespace, key, kv)
            return True
        except StoreFullError as full:
            self._full = True
            log.warning("chunks missed by queries are not stored any more: %s", full)
        except BlendragError as error:
            log.warning("a chunk of %d tokens was not stored: %s", len(ids), error)
        finally:
            self._queued.discard((ids, prefix))
        return False
