"""Encodes chunks that queries missed, and leading parts of prompts that came back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from blendrag.engine.kv_namespace import KVNamespace
from blendrag.engine.neighbours import Neighbours, beside
from blendrag.engine.request import Options
from blendrag.errors import BlendragError, StoreFullError
from blendrag.model.sharing import before_layers
from blendrag.planning.plan import MissingKV, Plan
from blendrag.serving.coroutine import GaveWay, pause
from blendrag.serving.pending import Pending
from blendrag.serving.scheduler import Scheduler
from blendrag.store.identity import beginning_key, chunk_keys, kv_namespace
from blendrag.store.kv import ChunkKV
from blendrag.text.prompt import Segment, SegmentedPrompt

log = logging.getLogger(__name__)

Ids = tuple[int, ...]

#: Leading parts remembered as seen once; one is stored when it comes back.
SEEN_LEADING = 1024
#: Most chunks that wait for background encoding; further ones are dropped until they are missed again.
QUEUED_CHUNKS = 256


@dataclass(frozen=True)
class Job:
    """Ids to be encoded after a prefix."""

    ids: Ids
    prefix: Ids | None
    """``None`` for the beginning of a prompt, whose KV is exact."""
    scope: str | None
    """Whose KV it is: that of a document if ``None``, else learned from prompts of that scope."""
    is_long: bool = False
    """Whether it is for long prompts, which have another rotary table."""
    others: tuple[Ids, ...] = field(default=(), compare=False)
    """Chunks that it may be encoded after, the nearest first."""

    @property
    def is_learned(self) -> bool:
        """Whether its KV is evicted first and in no remote."""
        return self.is_long or self.scope is not None

    @property
    def is_exact(self) -> bool:
        """Whether the model alone encodes it, which a lost writer does not prevent."""
        return self.prefix is None

    def places(self, namespace: str, chunks_are_exact: bool) -> tuple[str, tuple[str, ...]]:
        """Namespace and keys of the KV that a model of ``namespace`` computes; see :func:`chunk_keys`."""
        namespace = kv_namespace(namespace, self.scope, self.is_long)
        if self.prefix is None:
            return namespace, (beginning_key(namespace, self.ids, chunks_are_exact),)
        return namespace, chunk_keys(namespace, self.prefix, self.ids, chunks_are_exact)


class BackgroundWriter:
    """Encodes chunks that queries missed: between requests, or before a request if others wait."""

    def __init__(self, kv: KVNamespace, scheduler: Scheduler) -> None:
        self._kv = kv
        self._scheduler = scheduler
        self._queued: dict[Job, Job] = {}
        """Equal jobs may know other chunks; the values are those that were queued."""
        self._seen: dict[tuple[str, Ids], None] = {}
        self._full = False
        """Whether there was no room for KV of a document."""

    def note(self, plan: Plan, options: Options) -> None:
        """Queue the chunks that had no KV, and a leading part that the scope has seen before."""
        scope = options.scope
        is_long = self._is_long(plan.prompt)
        todo = self._jobs(plan.prompt, plan.missing, options, is_long)
        if plan.leading and scope is not None and self._seen_before(scope, plan.leading):
            todo.append(Job(plan.leading, None, scope, is_long))
        self.queue(todo)

    def _is_long(self, prompt: SegmentedPrompt) -> bool:
        adapter = self._kv.model.adapter
        return adapter.refusal is None and adapter.is_long(len(prompt.ids))

    def _jobs(
        self, prompt: SegmentedPrompt, missing: Sequence[MissingKV], options: Options, is_long: bool
    ) -> list[Job]:
        if not missing:
            return []  # the corpus may be unreadable, and is not needed
        prefix = self._kv.corpus.prefix_ids
        if not self._kv.recipe.encode_after:
            return [Job(ids, prefix, scope, is_long) for ids, scope in missing]
        others = partial(self._others, prompt.chunks, options.is_private)
        return [Job(each.ids, prefix, each.scope, is_long, others(each)) for each in missing]

    def _others(
        self, chunks: Sequence[Segment], is_private: bool, missing: MissingKV
    ) -> tuple[Ids, ...]:
        """What a missing chunk may be encoded after: the prompt's other ``chunks``, but no passage that was
        learned in a scope, if others use its KV. It must not show them what was in a private prompt, either;
        then it is encoded after the chunks that an ingest would choose."""
        if is_private and missing.scope is None:
            named = {MissingKV.of(segment): segment.chunk_id for segment in chunks}
            return self._similar(named[missing] or "")
        shared = [s.stored_ids for s in chunks if s.scope in (None, missing.scope)]
        ids = [*dict.fromkeys(shared)]
        return tuple(beside(ids, ids.index(missing.ids)))

    def _similar(self, chunk_id: str) -> tuple[Ids, ...]:
        kv, corpus = self._kv, self._kv.corpus.current
        if corpus is None:
            return ()
        try:
            found = corpus.chunk(chunk_id)
        except KeyError:  # it was removed meanwhile
            return ()
        texts = Neighbours(corpus, kv.recipe.encode_after).texts(found.title, found.chunk)
        return tuple(map(kv.model.text_ids, texts))

    @property
    def stores_missing(self) -> bool:
        """Whether chunks of documents that a query misses are encoded and stored."""
        return self._kv.is_writable and not self._full and not self._kv.validity.trouble

    def queue(self, todo: Sequence[Job]) -> None:
        """Encode these in the background."""
        if not (todo and self._kv.is_writable):
            return
        is_lost = bool(self._kv.validity.trouble)
        for job in todo:
            if (self._full and not job.is_learned) or (is_lost and not job.is_exact):
                continue
            if len(self._queued) >= QUEUED_CHUNKS:
                log.info("%d chunks wait to be encoded; no more are queued", QUEUED_CHUNKS)
                return
            if job not in self._queued:
                self._queued[job] = job
                self._scheduler.submit(Pending(partial(self._encode, job)), background=True)

    def due_now(
        self, prompt: SegmentedPrompt, missing: Sequence[MissingKV], options: Options
    ) -> tuple[list[Job], str]:
        """Which of a prompt's missing chunks are encoded before it runs, and why: all if other requests
        wait, else those that an earlier request missed and that have waited since. Passages that were learned
        from prompts delay no answer."""
        if not self.stores_missing:
            return [], ""
        missing = [each for each in missing if each.scope is None]
        is_waited_for = self._scheduler.is_waited_for
        if not missing or not (is_waited_for or self._queued):
            return [], ""
        is_long = self._is_long(prompt)
        if is_waited_for:
            return self._jobs(prompt, missing, options, is_long), "other requests waited"
        prefix = self._kv.corpus.prefix_ids
        known = [self._queued.get(Job(ids, prefix, scope, is_long)) for ids, scope in missing]
        return [job for job in known if job], "background encoding was not finished"

    def encode_first(self, jobs: Sequence[Job], check: Callable[[], None]) -> int:
        """Encode these chunks now, on the scheduler's thread; returns how many are stored.

        ``check`` is called before each and raises for a request that is over.
        """
        stored = 0
        for job in jobs:
            check()
            stored += self._encode(job)
            if self._full:
                break
        return stored

    def _seen_before(self, scope: str, leading: Ids) -> bool:
        seen = (scope, leading) in self._seen
        self._seen[scope, leading] = None
        if len(self._seen) > SEEN_LEADING:
            del self._seen[next(iter(self._seen))]
        return seen

    def verify(self) -> None:
        """Run the gate in the background, if no verdict on the model is known."""
        kv = self._kv

        def run() -> None:
            with kv.model.adapter.lock.in_background():
                kv.validity.verification()

        if kv.model.adapter.refusal is None and not kv.validity.is_verified:
            self._scheduler.submit(Pending(run), background=True)

    def _computed(
        self, job: Job, namespace: str, context: Ids, is_own: bool, alone: ChunkKV | None
    ) -> ChunkKV:
        """KV of ``job`` by the model ``alone`` (``is_own``) or by the recipe."""
        validity, adapter = self._kv.validity, self._kv.model.adapter
        encoder = partial(adapter.encode, is_long=True) if job.is_long else None
        if is_own:
            return validity.encode(namespace, job.ids, job.prefix or (), encoder)
        encode = partial(validity.encode_chunk, encoder=encoder, context=context, alone=alone)
        return encode(namespace, job.ids, job.prefix or ())

    def _encode(self, job: Job) -> bool:
        """Whether the KV is stored now. One in the background gives way to requests, also to those of
        another engine, before a layer."""
        kv = self._kv
        lock, is_over = kv.model.adapter.lock, True
        try:
            with lock.in_background():  # one identity from look-up to put
                namespace = kv.validity.namespace
                exact = kv.validity.recipe_of(namespace).is_exact
                place, keys = job.places(namespace, exact)
                found, alone = kv.store.where(place, keys, ask_remote=False), None
                for key in [key for key in reversed(keys) if key not in found]:
                    if not job.is_learned and kv.store.is_behind:
                        return False  # requests do not wait for a slow remote
                    kv.validity.admit(namespace)
                    context = kv.validity.context(job.others, len(job.ids), job.is_long)
                    is_own = job.is_exact or key != keys[0]
                    give_way_or_pause = partial(pause, lambda: lock.is_wanted)
                    with before_layers(kv.model.adapter.decoder_layers, give_way_or_pause):
                        computed = self._computed(job, namespace, context, is_own, alone)
                    alone = computed if is_own else None
                    kv.store.put(place, key, computed)
            return True
        except StoreFullError as full:
            if not job.is_learned:
                self._full = True
                log.warning("chunks missed by queries are no longer stored: %s", full)
            else:
                log.info("what was learned from prompts is not stored: %s", full)
        except BlendragError as error:
            log.warning("a chunk of %d tokens was not stored: %s", len(job.ids), error)
        except GaveWay:
            is_over = False
            raise
        finally:
            if is_over:
                self._queued.pop(job, None)
        return False
