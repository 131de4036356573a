"""Learns passages from plain prompts, so that an application reuses KV after only its LLM was swapped.

Text that was in an earlier prompt, too, becomes chunks of the corpus (:mod:`blendrag.text.passages`). They
are encoded in the background and reused from the third prompt on. What was seen once is only in memory.

Learned passages are entries of the parent :data:`LEARNED`, without vectors, so that search never finds them.
Their KV takes at most :data:`DISK_SHARE` of the store's limit and only space that is free; the least recently
used passages are dropped first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.documents import LEARNED, Entry, NewEntry
from blendrag.engine.kv_writer import BackgroundWriter, drop_orphaned_kv
from blendrag.engine.rendering import without_question
from blendrag.engine.request import Answer, Request
from blendrag.engine.resources import Resources
from blendrag.errors import BlendragError
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.text.chunking import Chunk
from blendrag.text.matches import Match, letters_in
from blendrag.text.passages import MIN_LETTERS, FreshText, PromptMemory, Run, joined, paragraphs

log = logging.getLogger(__name__)

#: Share of the disk tier that the KV of learned passages may take.
DISK_SHARE = 0.25


class Learner:
    """Passages that the prompts of one engine have in common. Learns on the worker's thread."""

    def __init__(self, resources: Resources, background: BackgroundWriter, learns: bool) -> None:
        self._resources = resources
        self._background = background
        self._learns = learns
        self._warned = False
        self._memory = PromptMemory()
        self._sizes: dict[str, int] | None = None
        """Bytes of the KV of each learned passage, by chunk id, the least recently used first."""
        self.passages = 0
        """Learned since the engine was made."""
        self.tokens = 0

    def advice(self, corpus: Corpus | None, fresh: FreshText) -> tuple[str, ...]:
        """A note, and one warning per engine, if a prompt meets a store without chunks."""
        if self._warned or letters_in(fresh.text) < MIN_LETTERS or (corpus and len(corpus)):
            return ()
        self._warned = True
        advice = (
            f"store {self._resources.root} holds no chunks, so nothing is reused; add them with "
            "BlendVectorStore.from_documents(pieces, …) (LangChain), BlendPrecompute (LlamaIndex) or "
            "blendrag ingest"
        )
        if self._learns and not self._resources.read_only:
            advice += (
                "; passages are learned when they return in a second prompt, and reused from the third on "
                "(learn=False turns this off)"
            )
        log.warning("%s", advice)
        return (advice,)

    def learn(self, request: Request, answer: Answer) -> Answer:
        """Learn what the request's prompt has in common with earlier ones; the answer with a note on it."""
        fresh = request.fresh
        if not self._learns or fresh is None or request.mode not in ("blend", "reuse"):
            return answer
        try:
            self._mark_used(request)
            chunks = self._stored(self._passages(fresh))
        except Exception as error:  # the answer is complete and must not be lost
            self._learns = False
            unexpected = None if isinstance(error, BlendragError) else error
            log.warning(
                "this engine learns no more passages from prompts: %s", error, exc_info=unexpected
            )
            return answer
        if not chunks:
            return answer
        tokens = sum(chunk.tokens for chunk in chunks)
        self.passages += len(chunks)
        self.tokens += tokens
        prefix, text_ids = self._resources.prefix_ids, self._resources.text_ids
        self._background.queue([(text_ids(chunk.text), prefix) for chunk in chunks])
        note = (
            f"{len(chunks)} passages ({tokens:,} tokens) were in an earlier prompt, too; they are encoded "
            "in the background and reused from the next request on"
        )
        metrics = replace(
            answer.metrics, learned_tokens=tokens, notes=(*answer.metrics.notes, note)
        )
        return replace(answer, metrics=metrics)

    def _passages(self, fresh: FreshText) -> list[Chunk]:
        """Chunks of what the prompt has in common with earlier ones, each once."""
        runs = self._memory.meet(fresh.text, fresh.spans)
        if not (runs and runs[0].begins_prompts and runs[0].ends_parts):
            return self._chunks(fresh, runs)
        # a whole message that begins both prompts is their instruction if passages follow it: what precedes
        # the first chunk again is reused as an exact prefix
        if fresh.chunks:
            after = [run for run in runs if run.start > fresh.chunks[0].start]
            return self._chunks(fresh, after)
        return self._chunks(fresh, runs[1:]) or self._chunks(fresh, runs)

    def _chunks(self, fresh: FreshText, runs: Sequence[Run]) -> list[Chunk]:
        """What ``runs`` of the prompt hold, without its question."""
        text = fresh.text
        spans = [span for run in runs for span in paragraphs(text, run)]
        matches = [Match("", start, end, complete=True) for start, end in spans]
        around = sorted([*fresh.chunks, *matches], key=lambda match: match.start)
        kept = [m for m in without_question(around, text, fresh.turn) if not m.chunk_id]
        passages = [
            text[start:end]
            for start, end in joined(text, [(m.start, m.end) for m in kept], runs)
            if not any(low < end and start < high for low, high in fresh.control)
        ]
        if not passages:
            return []
        split = self._resources.chunker().split
        chunks = {chunk.chunk_id: chunk for passage in passages for chunk in split(passage)}
        return [chunk for chunk in chunks.values() if letters_in(chunk.text) >= MIN_LETTERS]

    def _stored(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Those of ``chunks`` that there is room for, as entries of the corpus."""
        if not chunks or not self._resources.is_writable:
            return []
        corpus = self._resources.create_corpus()
        self._resources.remember_namespace()
        sizes, layout = self._known(corpus), self._resources.layout
        new = [chunk for chunk in chunks if chunk.chunk_id not in corpus.chunk_index]
        disk = next(t for t in self._resources.store.stats().tiers if t.tier == "disk")
        room = min(
            disk.limit_bytes - disk.size_bytes, DISK_SHARE * disk.limit_bytes - sum(sizes.values())
        )
        needed = {chunk.chunk_id: stored_chunk_bytes(layout, chunk.tokens) for chunk in new}
        forgotten = []
        while sizes and sum(needed.values()) > room:
            oldest = next(iter(sizes))
            room += sizes.pop(oldest)
            forgotten.append(_entry_id(oldest))
        kept = []
        for chunk in new:
            if (size := needed[chunk.chunk_id]) <= room:
                room -= size
                sizes[chunk.chunk_id] = size
                kept.append(chunk)
        if forgotten:
            corpus.entries.remove(forgotten)
            drop_orphaned_kv(self._resources, corpus)
        if kept:
            corpus.entries.put([_entry(chunk) for chunk in kept])
        return kept

    def _known(self, corpus: Corpus) -> dict[str, int]:
        if self._sizes is None:
            layout = self._resources.layout
            self._sizes = {
                chunk.chunk_id: stored_chunk_bytes(layout, chunk.tokens)
                for _, chunk in corpus.entries.read(corpus.entries.ids(LEARNED))
            }
        return self._sizes

    def _mark_used(self, request: Request) -> None:
        sizes = self._sizes or {}
        for segment in request.prompt.chunks:
            if segment.chunk_id in sizes:
                sizes[segment.chunk_id] = sizes.pop(segment.chunk_id)


def _entry_id(chunk_id: str) -> str:
    return f"{LEARNED}: {chunk_id}"


def _entry(chunk: Chunk) -> NewEntry:
    entry = Entry(_entry_id(chunk.chunk_id), chunk.text, parent=LEARNED)
    return NewEntry(entry, chunk, chunk.chunk_id, np.zeros(0, np.float32))
