"""KV that a prompt's prefill computed of chunks that had none, kept until they are encoded.

Chunks are encoded when nothing waits or runs. Until then, what a prefill has computed anyway serves later
prompts of the same scope. The chunk has seen the text before it there, as with ``encode_after``, so such KV
is blended and never counts as exact. It is in memory only, in namespaces of its own; the KV of the encoded
chunk goes before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from blendrag.engine.kv_namespace import KVNamespace
from blendrag.engine.request import Request
from blendrag.errors import StoreFullError
from blendrag.fusor import BlendCache
from blendrag.store.base import WantedKV
from blendrag.store.identity import chunk_key, kept_namespace
from blendrag.text.prompt import Segment

#: Chunks whose KV is found again; the memory tier may hold fewer.
MAX_KEPT = 4096


class KeptKV:
    """What one engine's prefills have left. Used on the scheduler's thread, under the model's lock."""

    def __init__(self, kv: KVNamespace) -> None:
        self._kv = kv
        self._tokens: OrderedDict[str, int] = OrderedDict()
        """By key of a chunk, the number of its tokens whose KV was kept; the newest last."""

    def lookup(
        self, namespace: str, scope: str | None
    ) -> Callable[[Segment], WantedKV | None] | None:
        """Finds what prompts of ``scope`` left of a chunk; ``None`` if they left nothing."""
        if scope is None or not self._tokens:
            return None
        return partial(self._wanted, kept_namespace(namespace, scope))

    def _wanted(self, within: str, chunk: Segment) -> WantedKV | None:
        key = chunk_key(within, self._kv.corpus.prefix_ids, chunk.stored_ids)
        tokens = self._tokens.get(key, 0)
        return WantedKV(within, key, tokens) if tokens > chunk.first else None

    def keep(self, request: Request, chunks: Iterable[Segment], cache: BlendCache) -> int:
        """Keep the KV of whole ``chunks`` of the prompt, which ``cache`` has computed; how many are kept.

        Without that of last tokens that have merged with the text after the chunk there.
        """
        adapter, scope = self._kv.model.adapter, request.options.scope
        chunks = [chunk for chunk in chunks if chunk.complete]
        if scope is None or not chunks or not adapter.fuses:
            return 0
        if adapter.is_long(len(request.prompt.ids)):
            return 0
        if not (cache.is_one_sequence and self._kv.validity.is_verified):
            return 0
        namespace = self._kv.validity.namespace
        within, prefix_ids = kept_namespace(namespace, scope), self._kv.corpus.prefix_ids
        kept = 0
        for chunk in chunks:
            if chunk.end > cache.get_seq_length():
                continue
            key = chunk_key(within, prefix_ids, chunk.stored_ids)
            if key in self._tokens and self._kv.store.memory.contains(within, key):
                kept += 1
                continue
            kv = adapter.taken(cache.buffers(chunk.end), chunk.position, len(prefix_ids))
            with suppress(StoreFullError):  # larger than the memory tier
                self._kv.store.memory.put(within, key, self._kv.validity.encoded(kv))
                self._tokens[key] = len(chunk.ids)
                self._kv.kept_in.add(within)
                kept += 1
        while len(self._tokens) > MAX_KEPT:
            self._tokens.popitem(last=False)
        return kept
