"""The corpus by id: what vector stores, indexes and ingestion pipelines keep in step.

Owns the order of a change: what is about to be stored is noted, KV is computed and put, then all
rows of the call are written in one transaction; rows are removed in one transaction, then KV. A crash
anywhere in between leaves a note by which the next change drops KV that no text refers to. Does not
know how the corpus writes rows (:mod:`blendrag.corpus.documents`) or how KV is computed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.documents import Entry
from blendrag.corpus.embedder import GIVEN, refuse_given
from blendrag.engine.adding import Adding, check_entries, given_vectors, unit_vector
from blendrag.engine.orphans import drop_orphaned_kv, kv_keys
from blendrag.engine.precompute import Computed, compute_kv, take_back
from blendrag.engine.resources import Resources
from blendrag.engine.types import Added, Hit
from blendrag.engine.worker import Worker
from blendrag.errors import IdentityChangedError, InvalidInputError
from blendrag.text.chunking import Chunk

__all__ = ["Added", "Entry", "Hit", "Library"]

Where = Callable[[Entry], bool]


class Library:
    """The entries of one engine's corpus. Thread-safe; reading waits for no change."""

    def __init__(self, resources: Resources, worker: Worker) -> None:
        self._resources = resources
        self._worker = worker
        self._changing = threading.Lock()

    # -- changing -------------------------------------------------------------------------------

    def add(
        self,
        entries: Sequence[Entry],
        vectors: np.ndarray | Sequence[Sequence[float]] | None = None,
        *,
        embedder: str = "",
        embed: bool = True,
        precompute: bool = True,
    ) -> Added:
        """Add entries, or change those whose ids are there; the last of a repeated id counts.

        What is unchanged costs a look-up, and its KV is computed again if the store lost it.

        Args:
            entries: each becomes one chunk.
            vectors: [len(entries), dim], of the caller's own embedding model, kept at unit length;
                ``None`` embeds with the corpus's own.
            embedder: name of that model, which later calls must give, too.
            embed: ``False`` stores no vectors: the entries are recognised in prompts and not found by
                :meth:`search`, for a corpus that something else searches.
            precompute: ``False`` leaves the KV to be computed once a prompt missed it.

        Raises :class:`InvalidInputError`, :class:`UnsupportedModelError`, :class:`StoreFullError`;
        nothing was added then.
        """
        began = time.perf_counter()
        rows = given_vectors(vectors, len(entries))
        if vectors is not None and not embed:
            raise InvalidInputError("vectors with embed=False, expected one of them; leave one out")
        check_entries(entries)
        if not entries:
            return Added()
        with self._changing:
            corpus = self._corpus_for(None if rows is None else embedder)
            adding = Adding(self._resources, corpus, entries, rows, embed)
            try:
                new = adding.new_entries()
                computed = self._compute(corpus, adding.chunks) if precompute else Computed()
                if new:
                    corpus.entries.put(new)
            except Exception:
                take_back(self._resources, corpus, adding.chunks)
                raise
            self._resources.remember_namespace()
            drop_orphaned_kv(self._resources, corpus)
        return Added(
            *adding.counts, computed.chunks, computed.tokens, computed.bytes,
            time.perf_counter() - began,
        )  # fmt: skip

    def delete(self, ids: Sequence[str]) -> list[str]:
        """Remove entries: the ids of those that were there.

        KV goes with the last entry or document that holds its text.
        """
        corpus = self._own()
        if corpus is None:
            return []
        with self._changing:
            there, _ = corpus.entries.remove(ids)
            drop_orphaned_kv(self._resources, corpus)
        return there

    def delete_parents(self, parents: Sequence[str]) -> list[str]:
        """Remove all entries of these parents; their ids."""
        corpus = self._own()
        if corpus is None:
            return []
        return self.delete([i for parent in parents for i in corpus.entries.ids(parent)])

    def clear(self) -> int:
        """Remove all entries, and no document that was ingested by path; how many there were."""
        return len(self.delete(self.ids()))

    def repair(self) -> int:
        """Drop the KV that a crash left behind; of how many chunks. Every change does so, too."""
        corpus = self._own()
        if corpus is None:
            return 0
        with self._changing:
            return drop_orphaned_kv(self._resources, corpus)

    # -- reading --------------------------------------------------------------------------------

    def __len__(self) -> int:
        corpus = self._own()
        return 0 if corpus is None else len(corpus.entries)

    def __bool__(self) -> bool:
        """An empty library is a library."""
        return True

    def ids(self) -> list[str]:
        """Ids of all entries, in the order in which they were added or last changed."""
        corpus = self._own()
        return [] if corpus is None else corpus.entries.ids()

    def get(self, ids: Sequence[str]) -> list[Entry]:
        """Entries in the order asked for; those that are not there are left out."""
        corpus = self._own()
        found: Mapping[str, Entry] = {} if corpus is None else corpus.entries.get(ids)
        return [found[entry_id] for entry_id in ids if entry_id in found]

    def entries(self, where: Where | None = None, parent: str | None = None) -> Iterator[Entry]:
        """Entries that ``where`` takes, in the order of :meth:`ids`."""
        corpus = self._own()
        for entry in () if corpus is None else corpus.entries.all(parent):
            if where is None or where(entry):
                yield entry

    def search(
        self, query: str | np.ndarray | Sequence[float], k: int, where: Where | None = None
    ) -> list[Hit]:
        """The k nearest entries, and chunks of ingested documents, that ``where`` takes.

        Nearest first. A text is embedded with the corpus's own embedder; a vector is taken as it is,
        at unit length. Raises :class:`InvalidInputError` for a vector of another length than the
        corpus's, and for a text where the vectors were given.
        """
        corpus = self._own()
        if corpus is None or k < 1 or corpus.search.dim() is None:
            return []
        vector = self.embed_query(query) if isinstance(query, str) else unit_vector(query)
        hits = corpus.entries.nearest(vector, k, where)
        return [Hit(found.entry, distance, found.vector) for found, distance in hits]

    def has_kv(self, ids: Sequence[str]) -> dict[str, bool]:
        """Whether the KV of each entry's text is stored now; of those entries that are there."""
        corpus = self._own()
        if corpus is None:
            return {}
        store = self._resources.store
        return {
            entry_id: any(store.contains(*key) for key in kv_keys(self._resources, corpus, text))
            for entry_id, text in corpus.entries.chunk_texts(ids).items()
        }

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of the corpus's own embedder.  float32 [n, dim], unit length"""
        self._require_own_embedder()
        return self._resources.embedder.embed(texts)

    def embed_query(self, text: str) -> np.ndarray:
        """Vector of a question.  float32 [dim], unit length"""
        self._require_own_embedder()
        return self._resources.embedder.embed_query(text)

    # -- details --------------------------------------------------------------------------------

    def _own(self) -> Corpus | None:
        """The corpus of this model, ``None`` where nothing was stored yet."""
        corpus = self._resources.corpus
        if corpus is None or not corpus.has_manifest:
            return None
        return self._resources.require_corpus()

    def _require_own_embedder(self) -> None:
        corpus = self._own()
        if corpus is not None:
            refuse_given(corpus.manifest.embedder)

    def _corpus_for(self, embedder: str | None) -> Corpus:
        """The corpus to add to; its vectors are of the given embedder, ``None`` for its own."""
        corpus = self._resources.create_corpus()
        if embedder is not None:
            corpus.set_manifest(replace(corpus.manifest, embedder=GIVEN + embedder))
        return corpus

    def _compute(self, corpus: Corpus, chunks: Sequence[Chunk]) -> Computed:
        unloaded = not self._resources.is_loaded
        try:
            return compute_kv(self._resources, self._worker, corpus, chunks)
        except IdentityChangedError:
            if not unloaded:
                raise
            # the files looked unchanged but hold other weights: now they are loaded
            return compute_kv(self._resources, self._worker, corpus, chunks)
