"""The write path of KV: chunk → ids → key → KV → store.

KV is computed by :meth:`KVValidity.encode`, so it is never stored under another model's namespace. A chunk is
encoded alone after the corpus's prefix, or after other chunks (``encode_after``); KV that a query's forward
computed is never stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TypeVar

from blendrag.engine.kv_namespace import KVNamespace
from blendrag.errors import IdentityChangedError, InvalidInputError
from blendrag.model.sharing import before_layers
from blendrag.serving.coroutine import pause
from blendrag.serving.scheduler import Scheduler
from blendrag.store.base import PinScope
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.identity import beginning_key
from blendrag.store.kv import ChunkKV
from blendrag.text.chunking import Chunk

T = TypeVar("T")
Ids = tuple[int, ...]


@dataclass
class Written:
    """What one run has computed and stored."""

    chunks: int = 0
    tokens: int = 0
    context_tokens: int = 0
    """Tokens of other chunks that these were encoded after, which were computed, too."""
    size_bytes: int = 0
    seconds: float = 0.0


class KVWriter:
    """Stores the KV of chunks for one run. Loads the model only when there is something to encode.

    Use within :meth:`pinned`. Entries found or stored there are not evicted for later ones; when nothing else
    is left to evict, :meth:`write` raises :class:`StoreFullError`.
    """

    def __init__(
        self,
        kv: KVNamespace,
        scheduler: Scheduler,
        begun: Callable[[str], None] = lambda step: None,
    ) -> None:
        """``begun`` is called with the name of each step that takes long."""
        self._kv = kv
        self._scheduler = scheduler
        self._begun = begun
        self._admitted = False
        self._pins: PinScope
        self.stored: set[str] = set()
        """Keys that were found or written and are not claimed yet."""
        self.written = Written()

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Within this context, entries of this run are not evicted."""
        with self._kv.store.pin_scope() as self._pins:
            yield

    @cached_property
    def namespace(self) -> str:
        """Where this run stores; does not change during the run."""
        kv = self._kv
        if not kv.model.is_loaded:
            self._begun("opening the model")
        # reading the model's identity waits for requests that run, unless its own thread does it
        namespace = self._computed(kv.name) if kv.model.is_loaded else kv.name()
        store = kv.store
        if kv.model.is_loaded or not (store.agrees(namespace) or store.trouble):
            self._computed(lambda: kv.validity.renew(namespace))
        return namespace

    def missing(self, chunks: Sequence[Chunk], ask_remote: bool = True) -> list[Chunk]:
        """Those of ``chunks`` that lack stored KV; that of the others is pinned."""
        keys = [self.keys_of(chunk) for chunk in chunks]
        where = self._kv.store.where
        found = where(self.namespace, chain(*keys), durable=True, ask_remote=ask_remote).keys()
        for key in found:
            self._pins.protect(self.namespace, key)
        self.stored |= found
        return [chunk for chunk, of in zip(chunks, keys, strict=True) if not found >= {*of}]

    def write(self, chunk: Chunk, name: str, others: Sequence[str] = ()) -> None:
        """Encode ``chunk`` and store its KV; ``name`` says in errors which text it is. ``others``: texts that
        it may be encoded after, the nearest first.

        Raises :class:`InvalidInputError` for a text that is too long or gives NaN, :class:`StoreFullError`,
        and :class:`IdentityChangedError` if the loaded weights are not those the run began with.
        """
        if not self._admitted:  # loads the model and may run the gate, which is not encoding
            self._begun("opening and checking the model")
            admit = partial(self._kv.validity.admit, self.namespace)
            self._kv.writer.keep()
            self._computed(admit)
            self._computed(self._put_undated)
            self._admitted = True
        self._begun("encoding")
        began = time.perf_counter()
        try:
            ids, keys = self._kv.model.text_ids(chunk.text), self.keys_of(chunk)
            context = self._kv.validity.context(map(self._kv.model.text_ids, others), len(ids))
            found = self._kv.store.where(self.namespace, keys, durable=True, ask_remote=False)
            alone: ChunkKV | None = None
            for key in reversed(keys):  # the model's own first, which may be a part of the other
                if key not in found:
                    is_own = key != keys[0]
                    kv = self._computed(partial(self._encode, ids, context, is_own, alone))
                    alone = kv if is_own else None
                    self._put(key, kv)
            self.written.context_tokens += len(context) * (keys[0] not in found)
        except InvalidInputError as bad:
            raise InvalidInputError(f"{name}: {bad}") from bad
        self.written.chunks += 1
        self.written.tokens += len(ids)
        self.written.seconds += time.perf_counter() - began

    def measure_decode_weights(self, watch: Callable[[float], None]) -> None:
        """Find out with which weights the model decodes, if this run has encoded something; else that is
        found out between answers. ``watch``: see :meth:`DecodeWeightsChoice.measure_all`."""
        if self._admitted:
            self._kv.model.decode_weights.measure_all(self._computed, watch)

    def claim(self) -> None:
        """Keep the run's KV from being collected in a remote. See :meth:`KVStore.claim`.

        What is written may have been there before, under the same key.
        """
        if self.stored:
            self._kv.store.claim(self.namespace, self.stored)
            self.stored.clear()

    def _computed(self, call: Callable[[], T]) -> T:
        return computed_among_requests(self._kv, self._scheduler, call)

    def _encode(self, ids: Ids, context: Ids, is_own: bool, alone: ChunkKV | None) -> ChunkKV:
        """KV of a chunk by the model ``alone`` (``is_own``) or by the recipe."""
        kv, prefix = self._kv, self._kv.corpus.prefix_ids
        with before_layers(kv.model.adapter.decoder_layers, pause):  # streams go on meanwhile
            if is_own:
                return kv.validity.encode(self.namespace, ids, prefix)
            encode = partial(kv.validity.encode_chunk, context=context, alone=alone)
            return encode(self.namespace, ids, prefix)

    def _put(self, key: str, kv: ChunkKV) -> None:
        self._kv.store.put(self.namespace, key, kv)
        self.stored.add(key)
        self.written.size_bytes += stored_chunk_bytes(kv.layout, kv.tokens)

    def _put_undated(self) -> None:
        """Store the KV of the prefix up to today's date."""
        kv, ids = self._kv, self._kv.corpus.undated_ids
        key = beginning_key(self.namespace, ids, kv.validity.recipe_of(self.namespace).is_exact)
        if ids and key not in kv.store.where(self.namespace, [key], durable=True):
            computed = kv.validity.encode(self.namespace, ids, ())
            kv.store.put(self.namespace, key, computed)
            self.stored.add(key)

    def keys_of(self, chunk: Chunk) -> tuple[str, ...]:
        return self._kv.keys_of(self.namespace, chunk.text)


def computed_among_requests(kv: KVNamespace, scheduler: Scheduler, call: Callable[[], T]) -> T:
    """``call()`` beside requests that run, unless the model is yet to be loaded or checked."""

    def joins() -> bool:
        if not kv.model.is_loaded or kv.model.adapter.lock.is_wanted:
            return False
        return kv.validity.is_admitted(kv.validity.namespace)

    return scheduler.run(call, joins)


def with_loaded_identity(kv: KVNamespace, run: Callable[[], T]) -> T:
    """``run()``, once more if the checkpoint's files looked unchanged but hold other weights.

    Raises :class:`IdentityChangedError` if the model was loaded before.
    """
    was_loaded = kv.model.is_loaded
    try:
        return run()
    except IdentityChangedError:
        if was_loaded:
            raise
        return run()


def remember_namespace(kv: KVNamespace, scheduler: Scheduler) -> None:
    """Record whose KV the corpus has, without waiting for requests that run."""
    if kv.model.is_loaded:
        computed_among_requests(kv, scheduler, kv.remember)
