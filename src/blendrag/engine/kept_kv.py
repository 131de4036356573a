"""KV that a prompt's prefill computed of chunks that had none, kept until they are encoded.

Chunks are encoded when nothing waits or runs. Until then, what a prefill has computed anyway serves later
prompts of the same scope. The chunk has seen the text before it there, as with ``encode_after``, so such KV
is blended and never counts as exact. It is in memory only, in namespaces of its own; the KV of the encoded
chunk goes before it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress

from blendrag.engine.kv_namespace import KVNamespace
from blendrag.engine.request import Request
from blendrag.errors import StoreFullError
from blendrag.fusor import BlendCache
from blendrag.store.identity import chunk_key, kept_namespace
from blendrag.text.prompt import Segment

log = logging.getLogger(__name__)


class KeptKV:
    """What the prefills of one engine have left. Used on the scheduler's thread; the caller holds the model's
    lock."""

    def __init__(self, kv: KVNamespace) -> None:
        self._kv = kv
        self._scopes: set[str] = set()
        """Those of whose prompts something was kept."""

    def namespace(self, namespace: str, scope: str | None) -> str | None:
        """Where the KV is that prompts of ``scope`` left; ``None`` if there is none."""
        return kept_namespace(namespace, scope) if scope in self._scopes and scope else None

    def keep(self, request: Request, chunks: Iterable[Segment], cache: BlendCache) -> int:
        """Keep the KV of whole ``chunks`` of the prompt, which ``cache`` has computed; how many are kept."""
        adapter, scope, tokens = (
            self._kv.model.adapter,
            request.options.scope,
            cache.get_seq_length(),
        )
        chunks = [chunk for chunk in chunks if chunk.complete]
        if scope is None or not chunks or adapter.refusal is not None:
            return 0
        if adapter.is_long(len(request.prompt.ids)):
            return 0
        if not (cache.is_one_sequence and self._kv.validity.is_verified):
            return 0
        namespace = self._kv.validity.namespace
        within, prefix_ids = kept_namespace(namespace, scope), self._kv.corpus.prefix_ids
        kept = 0
        for chunk in chunks:
            # the last tokens may have merged with the text after the chunk; theirs are taken for its own
            end = chunk.position + len(chunk.stored_ids)
            if end > tokens:
                continue
            key = chunk_key(within, prefix_ids, chunk.stored_ids)
            kv = adapter.taken(cache.buffers(end), chunk.position, len(prefix_ids))
            with suppress(StoreFullError):  # larger than the memory tier
                self._kv.store.memory.put(within, key, self._kv.validity.encoded(kv))
                kept += 1
        if kept:
            self._scopes.add(scope)
        return kept
