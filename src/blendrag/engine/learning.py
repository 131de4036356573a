"""Learns passages from plain prompts, so that an application reuses KV after only its LLM was swapped.

Text that was in an earlier prompt, too, becomes chunks of the corpus (:mod:`blendrag.text.passages`). They
are encoded in the background and reused from the third prompt on. What was seen once is only in memory.

Learned passages are entries of the parent :data:`LEARNED`, without vectors, so that search never finds them.
Each belongs to a scope (:attr:`Options.scope`): prompts of other scopes neither find it nor use its KV. The
KV takes at most what :meth:`KVStore.learned_limit_bytes` allows; the scope that has most drops its least
recently used passages first.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.documents import LEARNED, Entry, NewEntry
from blendrag.engine.background_writer import BackgroundWriter, Job
from blendrag.engine.kept_kv import KeptKV
from blendrag.engine.kv_namespace import KVNamespace
from blendrag.engine.neighbours import beside
from blendrag.engine.request import Answer, Request
from blendrag.errors import BlendragError
from blendrag.fusor import BlendCache
from blendrag.planning.plan import Plan
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.text.chunking import Chunk, learned_id, scope_of
from blendrag.text.matches import Match, letters_in
from blendrag.text.passages import (
    MIN_LETTERS,
    CommonText,
    FreshText,
    PromptMemories,
    joined,
    paragraphs,
)
from blendrag.text.prompt import Segment, segment_prompt
from blendrag.text.questions import without_question

log = logging.getLogger(__name__)

#: Modes that reuse chunks wherever they are in a prompt.
LEARNING_MODES = ("blend", "reuse")
#: Scopes that are remembered as told that the store holds no chunks.
TOLD_SCOPES = 1024


class FoundPassage(NamedTuple):
    """A chunk of a prompt's text, from character ``start`` to ``end``."""

    chunk: Chunk
    start: int
    end: int


class Learner:
    """Passages that the prompts of one engine have in common. Learns on the scheduler's thread."""

    def __init__(self, kv: KVNamespace, background: BackgroundWriter, kept: KeptKV) -> None:
        self._kv = kv
        self._background = background
        self._kept = kept
        self._learns = kv.settings.learn
        self.is_first = True
        """Whether no prompt was learned from yet."""
        self._told: dict[str | None, None] = {}
        self._memories = PromptMemories()
        self._sizes: dict[str, dict[str, int]] | None = None
        """Bytes of the KV of each learned passage, by scope and chunk id, the least recently used first."""
        self.passages = 0
        """Learned since the engine was made."""
        self.tokens = 0

    def advised(self, request: Request) -> Request:
        """``request`` with a note, once per scope, if the store has no chunks; one warning per engine."""
        fresh, scope = request.fresh, request.options.scope
        if fresh is None or request.mode not in LEARNING_MODES or scope in self._told:
            return request
        corpus = self._kv.corpus.current
        known = corpus.known_to(scope) if corpus else ()
        if len(known) or len(self._told) >= TOLD_SCOPES or letters_in(fresh.text) < MIN_LETTERS:
            return request
        is_first = not self._told
        self._told[scope] = None
        advice = (
            f"store {self._kv.root} holds no chunks, so none is reused; add them with "
            "BlendVectorStore.from_documents(pieces, …) (LangChain), BlendPrecompute (LlamaIndex) or "
            "blendrag ingest"
        )
        if self._learns and not self._kv.corpus.read_only:
            advice += (
                "; passages are learned when they return in a second prompt, and reused from the third on "
                "(learn=False turns this off)"
            )
        if is_first:
            log.warning("%s", advice)
        return replace(request, notes=(*request.notes, advice))

    def lesson(self, request: Request) -> Lesson:
        """What is learned from this request, which begins now."""
        learns = self._learns and request.mode in LEARNING_MODES and request.fresh is not None
        return Lesson(self, request, learns and request.options.scope is not None)

    def meet(self, request: Request) -> list[FoundPassage]:
        """Chunks that the prompt has in common with earlier ones of its scope. It is remembered, too."""
        fresh, scope = request.fresh, request.options.scope
        assert fresh is not None
        assert scope is not None
        runs = self._memories.meet(scope, fresh.text, fresh.spans)
        if not (runs and runs[0].begins_prompts and runs[0].ends_parts):
            return self._chunks(fresh, runs)
        # a whole message that begins both prompts is their instruction if passages follow it: what precedes
        # the first chunk again is reused as an exact prefix
        if fresh.chunks:
            after = [run for run in runs if run.start > fresh.chunks[0].start]
            return self._chunks(fresh, after)
        return self._chunks(fresh, runs[1:]) or self._chunks(fresh, runs)

    def keep(
        self, request: Request, plan: Plan, passages: Sequence[FoundPassage], cache: BlendCache
    ) -> int:
        """Keep the KV that the prompt's prefill has computed of these passages and of chunks that had none;
        of how many passages it is kept."""
        missing = [c.segment for c in plan.chunks if c.reason.is_missing and c.span is None]
        self._kept.keep(request, missing, cache)
        return self._kept.keep(request, self._segments(request, passages), cache) if passages else 0

    def stop(self, error: Exception) -> None:
        """Learn no more: the answer must not be lost."""
        self._learns = False
        unexpected = None if isinstance(error, BlendragError) else error
        log.warning(
            "this engine learns no more passages from prompts: %s", error, exc_info=unexpected
        )

    def store(self, request: Request, passages: Sequence[FoundPassage]) -> list[Chunk]:
        """Add those of these passages that there is room for, and encode them in the background."""
        scope = request.options.scope
        assert scope is not None
        self._mark_used(request, scope)
        if self.is_first:  # the gate takes seconds, and must have passed before KV is kept
            self.is_first = False
            self._background.verify()
        chunks = self._stored([passage.chunk for passage in passages], scope)
        self.passages += len(chunks)
        self.tokens += sum(chunk.tokens for chunk in chunks)
        prefix, text_ids = self._kv.corpus.prefix_ids, self._kv.model.text_ids
        ids = [text_ids(chunk.text) for chunk in chunks]
        after = self._kv.recipe.encode_after
        others = [tuple(beside(ids, i)) if after else () for i in range(len(ids))]
        self._background.queue(
            [Job(each, prefix, scope, others=more) for each, more in zip(ids, others, strict=True)]
        )
        return chunks

    def _segments(self, request: Request, passages: Sequence[FoundPassage]) -> list[Segment]:
        """The passages among the tokens of the prompt, without those that are tokenised otherwise in it."""
        fresh, prompt, model = request.fresh, request.prompt, self._kv.model
        assert fresh is not None
        ids = {segment.chunk_id: segment.stored_ids for segment in prompt.chunks}
        known = [match for match in fresh.chunks if match.chunk_id in ids]
        new = [Match(p.chunk.chunk_id, p.start, p.end, complete=True) for p in passages]
        ids |= {p.chunk.chunk_id: model.text_ids(p.chunk.text) for p in passages}
        matches = sorted([*known, *new], key=lambda match: match.start)
        found = segment_prompt(fresh.text, matches, model.tokens, lambda name: ids[name])
        named = {match.chunk_id for match in new}
        return [
            segment
            for segment in found.chunks
            if segment.chunk_id in named
            and prompt.ids[segment.position : segment.end] == segment.ids
        ]

    def _chunks(self, fresh: FreshText, runs: Sequence[CommonText]) -> list[FoundPassage]:
        """What ``runs`` of the prompt hold, without its question."""
        text = fresh.text
        spans = [span for run in runs for span in paragraphs(text, run)]
        matches = [Match("", start, end, complete=True) for start, end in spans]
        around = sorted([*fresh.chunks, *matches], key=lambda match: match.start)
        kept = [m for m in without_question(around, text, fresh.turn) if not m.chunk_id]
        whole = [
            (start, end)
            for start, end in joined(text, [(m.start, m.end) for m in kept], runs)
            if not any(low < end and start < high for low, high in fresh.control)
        ]
        if not whole:
            return []
        split = partial(self._kv.corpus.chunker().split, with_context=False)
        passages: dict[str, FoundPassage] = {}
        for start, end in whole:
            for chunk in split(text[start:end]):
                if letters_in(chunk.text) >= MIN_LETTERS:
                    found = FoundPassage(chunk, start + chunk.start, start + chunk.end)
                    passages.setdefault(chunk.chunk_id, found)
        return [*passages.values()]

    def _stored(self, chunks: Sequence[Chunk], scope: str) -> list[Chunk]:
        """Those of ``chunks`` that there is room for, as entries of the corpus."""
        if not chunks or not self._kv.is_writable:
            return []
        corpus = self._kv.corpus.create()
        self._kv.remember(by_ingest=False)
        known = corpus.known_to(scope)
        learned = {chunk.chunk_id: learned_id(scope, chunk.text) for chunk in chunks}
        new = {
            learned[chunk.chunk_id]: replace(chunk, chunk_id=learned[chunk.chunk_id])
            for chunk in chunks
            if chunk.chunk_id not in known and learned[chunk.chunk_id] not in known
        }
        sizes = self._known(corpus)
        own = sizes.setdefault(scope, {})
        limit_bytes = self._kv.store.learned_limit_bytes()
        forgotten, kept = _beyond(sizes, limit_bytes, ()) or [], list[Chunk]()
        for chunk_id, chunk in new.items():
            own[chunk_id] = self._stored_bytes(chunk.tokens)
            dropped = _beyond(sizes, limit_bytes, {c.chunk_id for c in kept} | {chunk_id})
            if dropped is None:
                del own[chunk_id]
                continue
            kept.append(chunk)
            forgotten += dropped
        if forgotten:
            corpus.entries.remove(forgotten)
            self._kv.drop_orphaned()
        if kept:
            corpus.entries.put([_entry(chunk) for chunk in kept])
        return kept

    def _known(self, corpus: Corpus) -> dict[str, dict[str, int]]:
        if self._sizes is None:
            self._sizes = {}
            for _, chunk in corpus.entries.read(corpus.entries.ids(LEARNED)):
                if (scope := scope_of(chunk.chunk_id)) is not None:
                    size_bytes = self._stored_bytes(chunk.tokens)
                    self._sizes.setdefault(scope, {})[chunk.chunk_id] = size_bytes
        return self._sizes

    def _stored_bytes(self, tokens: int) -> int:
        """Of all KV of a chunk."""
        return self._kv.recipe.variants * stored_chunk_bytes(self._kv.layout, tokens)

    def _mark_used(self, request: Request, scope: str) -> None:
        sizes = (self._sizes or {}).get(scope, {})
        for segment in request.prompt.chunks:
            if segment.chunk_id in sizes:
                sizes[segment.chunk_id] = sizes.pop(segment.chunk_id)


class Lesson:
    """What one request teaches: its passages, and their KV."""

    def __init__(self, learner: Learner, request: Request, learns: bool) -> None:
        self._learner = learner
        self._request = request
        self._learns = learns
        self._passages: list[FoundPassage] | None = None
        """``None`` before they were looked for."""
        self._kept = 0

    def take(self, plan: Plan, cache: BlendCache) -> None:
        """The prompt is prefilled: keep the KV of passages. Raises nothing."""
        try:
            self._passages = self._learner.meet(self._request) if self._learns else []
            self._kept = self._learner.keep(self._request, plan, self._passages, cache)
        except Exception as error:
            self._learner.stop(error)
            self._learns = False

    def learned(self, answer: Answer) -> Answer:
        """The request was answered: store its passages. ``answer`` with a note on them; raises nothing."""
        if not self._learns:
            return answer
        try:
            if self._passages is None:
                self._passages = self._learner.meet(self._request)
            chunks = self._learner.store(self._request, self._passages)
        except Exception as error:
            self._learner.stop(error)
            return answer
        if not chunks:
            return answer
        tokens = sum(chunk.tokens for chunk in chunks)
        passages, were = (
            (f"{len(chunks)} passages", "were") if len(chunks) > 1 else ("1 passage", "was")
        )
        then = "from the next request on" if self._kept >= len(chunks) else "from then on"
        note = (
            f"{passages} ({tokens:,} tokens) {were} in an earlier prompt, too: encoded in the background, "
            f"reused {then}"
        )
        metrics = replace(
            answer.metrics, learned_tokens=tokens, notes=(*answer.metrics.notes, note)
        )
        return replace(answer, metrics=metrics)


def _beyond(
    sizes: dict[str, dict[str, int]], limit_bytes: int, stay: Collection[str]
) -> list[str] | None:
    """Take passages out of ``sizes`` until at most ``limit_bytes`` are left; their ids.

    The scope that has most gives up its least recently used ones. ``None``, and nothing is taken, if that
    would take one of ``stay``.
    """
    totals = {scope: sum(each.values()) for scope, each in sizes.items()}
    excess_bytes = sum(totals.values()) - limit_bytes
    waiting = {scope: (i for i in list(each) if i not in stay) for scope, each in sizes.items()}
    taken: list[tuple[str, str]] = []
    while excess_bytes > 0:
        most = max(totals, key=lambda scope: totals[scope])
        oldest = next(waiting[most], None)
        if oldest is None:
            return None
        taken.append((most, oldest))
        totals[most] -= sizes[most][oldest]
        excess_bytes -= sizes[most][oldest]
    for scope, chunk_id in taken:
        del sizes[scope][chunk_id]
    return [chunk_id for _, chunk_id in taken]


def _entry(chunk: Chunk) -> NewEntry:
    entry = Entry(chunk.chunk_id, chunk.text, parent=LEARNED)
    return NewEntry(entry, chunk, chunk.chunk_id, np.zeros(0, np.float32))
