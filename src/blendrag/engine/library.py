"""The corpus by id, for vector stores, indexes and ingestion pipelines.

Safe to kill at any point: texts are noted, KV is stored, then all rows of the call are written in one
transaction. Rows are removed first, then KV. The note of a killed call lets the next change drop orphaned KV.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.documents import ADDING, REMOVED, Entry, Hit, NewEntry
from blendrag.corpus.embedder import GIVEN, Embedder, refuse_given
from blendrag.corpus.embedding_turns import Check, proceed
from blendrag.corpus.filters import Filter
from blendrag.corpus.languages import Languages
from blendrag.engine.additions import STEP_ENTRIES, AdditionStep, BackgroundAdditions
from blendrag.engine.kv_namespace import KVNamespace
from blendrag.engine.kv_writer import (
    KVWriter,
    Written,
    remember_namespace,
    with_loaded_identity,
)
from blendrag.engine.neighbours import Neighbours, beside
from blendrag.engine.request_spans import retrieval
from blendrag.errors import BlendragError, InvalidInputError, check_unicode
from blendrag.serving.scheduler import Scheduler
from blendrag.store.identity import digest_fields
from blendrag.text.chunking import Chunk, canonical, chunk_id_of
from blendrag.text.matches import is_recognisable
from blendrag.text.names import MAX_METADATA_BYTES, check_metadata, check_name
from blendrag.wording import quoted

log = logging.getLogger(__name__)

__all__ = ["Added", "Entry", "Hit", "Library"]


@dataclass(frozen=True)
class Added:
    """What one addition to the library did, in entries and in KV."""

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    computed: int = 0
    """Chunks whose KV was computed in this call."""
    tokens: int = 0
    """Tokens of those."""
    bytes: int = 0
    seconds: float = 0.0


Where = Callable[[Entry], bool]
#: Gives a row for each of some entries.
VectorsOf = Callable[[Sequence[Entry]], np.ndarray | Sequence[Sequence[float]] | None]


class Library:
    """The entries of one engine's corpus. Thread-safe; reads do not wait for changes."""

    def __init__(self, kv: KVNamespace, scheduler: Scheduler) -> None:
        self._kv = kv
        self._scheduler = scheduler
        self._changing = threading.Lock()
        self.additions = BackgroundAdditions()
        """What is added while callers go on."""
        self._warned = False
        self._languages: Languages | None = Languages()
        """The languages of the texts that were embedded here; ``None`` after its warning."""

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
        """Add entries, or change those with known ids; the last of a repeated id counts.

        An unchanged entry costs a look-up; its KV is computed again if the store has lost it.

        Args:
            entries: each becomes one chunk.
            vectors: [len(entries), dim] from the caller's embedding model, stored at unit length; ``None``
                embeds with the corpus's embedder.
            embedder: name of the caller's model; later calls must give the same.
            embed: ``False`` stores no vectors: entries are recognised in prompts but not found by
                :meth:`search`.
            precompute: ``False`` computes KV only after a prompt has missed it.

        Raises :class:`InvalidInputError`, :class:`UnsupportedModelError`, :class:`StoreFullError`; then
        nothing was added.
        """
        self.additions.check()
        began = time.perf_counter()
        rows = given_vectors(vectors, len(entries))
        if vectors is not None and not embed:
            raise InvalidInputError("vectors with embed=False, expected one of them; leave one out")
        check_entries(entries)
        if not entries:
            return Added()
        with self._changing:
            embeds = embed and rows is None
            corpus = self._kv.create_corpus(encodes=precompute, embeds=embeds)
            if rows is not None:
                corpus.set_manifest(replace(corpus.manifest, embedder=GIVEN + embedder))
            new = self._rows(entries, rows, embed)
            known = corpus.entries.read([row.entry.id for row in new])
            before = {entry.id: chunk.digest for entry, chunk in known}
            changed = [row for row in new if before.get(row.entry.id) != row.digest]
            added = sum(row.entry.id not in before for row in changed)
            chunks = [row.chunk for row in new]
            try:
                if embeds:
                    changed = self._embedded(corpus, changed)
                with corpus.dropped.adding():
                    others = self._others(corpus, new, changed) if precompute else {}
                    written = self._write_kv(corpus, chunks, others) if precompute else Written()
                    if changed:
                        self._kv.with_room(partial(corpus.entries.put, changed))
            except Exception:
                with suppress(BlendragError):  # the note left before writing drops it later
                    corpus.dropped.note(chunks, REMOVED)
                    self._kv.drop_orphaned()
                raise
            if not self._scheduler.closed:  # else the next addition does
                remember_namespace(self._kv, self._scheduler)
            self._kv.drop_orphaned()
        return Added(
            added=added,
            changed=len(changed) - added,
            unchanged=len(new) - len(changed),
            computed=written.chunks,
            tokens=written.tokens,
            bytes=written.size_bytes,
            seconds=time.perf_counter() - began,
        )

    def add_in_background(
        self,
        entries: Sequence[Entry],
        vectors: VectorsOf | None = None,
        *,
        embedder: str = "",
        precompute: bool = True,
        at_a_time: int = STEP_ENTRIES,
    ) -> None:
        """:meth:`add` on another thread, after what waits there, so many entries at a time; ``vectors`` gives
        those of some entries there. :attr:`additions` tells how far it is.

        Raises :class:`InvalidInputError` for entries that cannot be stored, and the error of earlier ones.
        """
        check_entries(entries)

        def step(batch: Sequence[Entry]) -> None:
            rows = None if vectors is None else vectors(batch)
            self.add(batch, rows, embedder=embedder, precompute=precompute)

        batches = (entries[at : at + at_a_time] for at in range(0, len(entries), at_a_time))
        self.additions.submit(AdditionStep(batch, step) for batch in batches)

    def delete(self, ids: Sequence[str]) -> list[str]:
        """Remove entries, also those that wait to be added; returns the ids of those that existed.

        KV is deleted with the last entry or document that holds its text.
        """
        wanted = set(ids)
        return self._delete(lambda entry: entry.id in wanted, lambda: ids)

    def delete_parents(self, parents: Sequence[str]) -> list[str]:
        """Remove all entries of these parents; returns their ids."""
        wanted = set(parents)
        return self._delete(
            lambda entry: entry.parent in wanted,
            lambda: [i for parent in parents for i in self.ids(parent)],
        )

    def clear(self) -> int:
        """Remove all entries, but no document that was ingested by path; returns how many."""
        return len(self._delete(lambda entry: True, self.ids))

    def _delete(
        self, is_meant: Callable[[Entry], bool], ids: Callable[[], Sequence[str]]
    ) -> list[str]:
        """``ids()`` is called once no entry that ``is_meant`` waits any more."""
        self.additions.check()
        waited = [entry.id for entry in self.additions.forget(is_meant)]
        there = list[str]()
        if (corpus := self._own()) is not None:
            with self._changing:
                there, _ = corpus.entries.remove(ids())
                self._kv.drop_orphaned()
        return [*dict.fromkeys([*there, *waited])]

    def repair(self) -> int:
        """Drop KV that a crash left behind, as every change does; returns the number of chunks."""
        corpus = self._own()
        if corpus is None:
            return 0
        with self._changing:
            return self._kv.drop_orphaned()

    # -- reading --------------------------------------------------------------------------------

    def __len__(self) -> int:
        corpus = self._own()
        return 0 if corpus is None else len(corpus.entries)

    def __bool__(self) -> bool:
        """True: an empty library is not falsy."""
        return True

    def ids(self, parent: str | None = None) -> list[str]:
        """Ids of all entries (of one parent), in the order they were added or last changed."""
        corpus = self._own()
        return [] if corpus is None else corpus.entries.ids(parent)

    def get(self, ids: Sequence[str]) -> list[Entry]:
        """Entries in the order of ``ids``, without unknown ids."""
        corpus = self._own()
        found = {} if corpus is None else corpus.entries.get(ids)
        return [found[entry_id] for entry_id in ids if entry_id in found]

    def entries(
        self, where: Where | None = None, parent: str | None = None, *, filter: Filter | None = None
    ) -> Iterator[Entry]:
        """Entries that ``filter`` and ``where`` accept, in the order of :meth:`ids`."""
        corpus = self._own()
        if corpus is not None:
            allowed = corpus.allowed(filter)
            each = corpus.entries.all(parent, allowed)
            yield from (entry for entry in each if where is None or where(entry))

    def search(
        self,
        query: str | np.ndarray | Sequence[float],
        k: int,
        where: Where | None = None,
        *,
        filter: Filter | None = None,
    ) -> list[Hit]:
        """The k nearest entries and chunks of documents that ``filter`` and ``where`` accept, nearest first.

        A text is embedded with the corpus's embedder; a vector is normalised. Raises
        :class:`InvalidInputError` for a vector of the wrong length, and for a text if vectors were given.
        """
        corpus = self._own()
        if corpus is None and not self._kv.root.exists() and not self._warned:
            self._warned = True
            log.warning(
                "store %s does not exist, so searches find nothing; check its path or add texts first",
                self._kv.root,
            )
        if corpus is None or k < 1 or corpus.vectors.dim() is None:
            return []
        with retrieval(self._kv.root, k):
            vector = self.embed_query(query) if isinstance(query, str) else unit_vector(query)
            with corpus.file.reading():
                return corpus.entries.nearest(vector, k, where, corpus.allowed(filter))

    def has_kv(self, ids: Sequence[str]) -> dict[str, bool]:
        """Whether the KV of each entry's text is stored; without unknown ids."""
        corpus = self._own()
        if corpus is None:
            return {}
        store = self._kv.store
        return {
            entry.id: any(
                store.where(namespace, keys).keys() >= {*keys}
                for namespace, keys in self._kv.places_of(chunk.chunk_id, chunk.text).items()
            )
            for entry, chunk in corpus.entries.read(ids)
        }

    def embed(
        self,
        texts: Sequence[str],
        *,
        check: Check = proceed,
        counted: Callable[[int], None] = lambda tokens: None,
    ) -> np.ndarray:
        """Vectors from the corpus's embedder, float32 [n, dim] at unit length.

        ``check`` is called between batches and while waiting, ``counted`` with the number of tokens before
        the first batch; both may raise to give up.
        """
        return self._own_embedder().embed(texts, check=check, counted=counted)

    def embed_query(self, text: str, *, check: Check = proceed) -> np.ndarray:
        """Vector of a question, float32 [dim] at unit length."""
        return self._own_embedder().embed_query(text, check=check)

    # -- details --------------------------------------------------------------------------------

    def _own(self) -> Corpus | None:
        """The corpus of this model, ``None`` before anything was stored."""
        corpus = self._kv.corpus.current
        if corpus is None or corpus.manifest_or_none is None:
            return None
        return self._kv.corpus.require()

    def _own_embedder(self) -> Embedder:
        corpus = self._own()
        if corpus is not None:
            refuse_given(corpus.manifest.embedder)
        return self._kv.corpus.embedder

    def _rows(
        self, entries: Sequence[Entry], vectors: np.ndarray | None, embed: bool
    ) -> list[NewEntry]:
        """The last entry of each id, with its chunk and given vector (else an empty one)."""
        rows = {}
        for i, entry in enumerate(entries):
            text = canonical(entry.text)
            tokens = len(self._kv.model.text_ids(text))
            chunk = Chunk(text, entry.start, entry.start + len(text), tokens, chunk_id_of(text))
            vector = np.zeros(0, np.float32) if vectors is None else vectors[i]
            rows[entry.id] = NewEntry(entry, chunk, digest_of_entry(entry, embed, vector), vector)
        return list(rows.values())

    def _embedded(self, corpus: Corpus, rows: Sequence[NewEntry]) -> list[NewEntry]:
        """With vectors of the corpus's embedder."""
        refuse_given(corpus.manifest.embedder)
        if self._languages is not None:
            for row in rows:
                self._languages.add(row.chunk.text)
            if warning := self._languages.warning(corpus.manifest.embedder):
                log.warning("%s", warning)
                self._languages = None
        titled = [(row.entry.title, row.chunk) for row in rows]
        vectors = self._kv.corpus.vectors_of(corpus, titled)
        return [row._replace(vector=v) for row, v in zip(rows, vectors, strict=True)]

    def _others(
        self, corpus: Corpus, new: Sequence[NewEntry], changed: Sequence[NewEntry]
    ) -> dict[str, Callable[[], Sequence[str]]]:
        """By chunk id, what finds the texts that a chunk may be encoded after: similar ones, or without
        vectors those that precede it among ``new``."""
        most = self._kv.recipe.encode_after
        if not most:
            return {}
        neighbours = Neighbours(corpus, most)
        for entry, chunk, _, vector in changed:
            neighbours.add([(entry.title, chunk)], [vector], replaces=entry.id)
        texts = [*dict.fromkeys(row.chunk.text for row in new)]

        def find(row: NewEntry) -> Sequence[str]:
            similar = neighbours.texts(row.entry.title, row.chunk)
            return similar or beside(texts, texts.index(row.chunk.text))

        return {row.chunk.chunk_id: partial(find, row) for row in new}

    def _write_kv(
        self,
        corpus: Corpus,
        chunks: Sequence[Chunk],
        others: Mapping[str, Callable[[], Sequence[str]]],
    ) -> Written:
        """Store the KV of chunks that have none and are long enough to be recognised in a prompt."""
        wanted = list({c.chunk_id: c for c in chunks if is_recognisable(c.text)}.values())
        if not wanted:
            return Written()

        def run() -> Written:
            writer = KVWriter(self._kv, self._scheduler)
            with writer.pinned():
                missing = writer.missing(wanted)
                if missing:
                    corpus.dropped.note(missing, ADDING)  # dropped again if this is killed
                    remember_namespace(self._kv, self._scheduler)
                    self._kv.record_recipe()
                for chunk in missing:
                    find = others.get(chunk.chunk_id, tuple)
                    writer.write(chunk, f"the text {chunk.text[:40]!r}…", find())
            self._kv.store.flush()
            writer.claim()
            return writer.written

        return with_loaded_identity(self._kv, run)


def check_entries(entries: Sequence[Entry]) -> None:
    """Raise :class:`InvalidInputError` for entries that cannot be stored and returned unchanged."""
    for entry in entries:
        if not isinstance(entry.id, str) or not entry.id:
            raise InvalidInputError(f"id {quoted(entry.id)} of an entry, expected a non-empty text")
        for name, text in (("id", entry.id), ("text", entry.text), ("parent", entry.parent)):
            check_unicode(text, f"{name} of entry {quoted(entry.id)}")
        for name, text in (("id", entry.id), ("parent", entry.parent), ("source", entry.source)):
            check_name(f"{name} of entry {quoted(entry.id)}", text)
        # LlamaIndex gives the metadata of a node as its title
        check_name(f"title of entry {quoted(entry.id)}", entry.title, MAX_METADATA_BYTES)
        for key, value in entry.metadata.items():
            try:
                json.dumps({key: value}, ensure_ascii=False).encode("utf-8")
            except (TypeError, ValueError, RecursionError) as exc:
                raise InvalidInputError(
                    f"metadata {quoted(key)} of entry {quoted(entry.id)} is a "
                    f"{type(value).__name__} that JSON cannot "
                    "hold; expected text, numbers, lists or objects of them: convert it or leave it out"
                ) from exc
        check_metadata(f"metadata of entry {quoted(entry.id)}", entry.metadata)


def given_vectors(
    vectors: np.ndarray | Sequence[Sequence[float]] | None, entries: int
) -> np.ndarray | None:
    """The caller's vectors at unit length, float32 [entries, dim]."""
    if vectors is None:
        return None
    rows = np.asarray(vectors, np.float32)
    if not entries and not rows.size:
        return None
    if rows.ndim != 2 or len(rows) != entries or not rows.shape[1]:
        raise InvalidInputError(
            f"vectors of shape {rows.shape} for {entries} entries, expected ({entries}, dim)"
        )
    if not np.isfinite(rows).all():
        raise InvalidInputError(
            "a vector holds NaN or infinity, expected numbers; look at the embedding model's output"
        )
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.ascontiguousarray(rows / np.maximum(norms, 1e-12), np.float32)


def unit_vector(vector: np.ndarray | Sequence[float]) -> np.ndarray:
    """One vector at unit length, float32 [dim]."""
    rows = given_vectors(np.asarray(vector, np.float32)[None], 1)
    assert rows is not None
    return rows[0]


def digest_of_entry(entry: Entry, embed: bool, vector: np.ndarray) -> str:
    """Digest of all that a row holds; equal digests need no write. ``vector``: the caller's, or empty."""
    fields = ["entry", entry.id, entry.text, entry.parent, entry.title, str(entry.start)]
    fields += [json.dumps(dict(entry.metadata), sort_keys=False), str(embed)]
    encoded = (field.encode("utf-8", "surrogatepass") for field in fields)
    return digest_fields([*encoded, vector.tobytes()])
