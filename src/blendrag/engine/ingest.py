"""The way of a document: reader → chunks → key → KV → store → embedding → corpus.

Owns the order, which makes it safe to interrupt anywhere and to repeat: KV is put first (durable when
``put`` returns), the document's row last, in one transaction. An unchanged document whose chunks all
have KV costs a look-up and no model work. Does not own the store, the corpus or the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.embedder import Embedder
from blendrag.engine.types import IngestReport
from blendrag.errors import InvalidInputError, StoreFullError, UnreadableDocumentError
from blendrag.store.base import KVStore, PinScope
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.identity import chunk_key
from blendrag.store.kv import ChunkKV
from blendrag.text.chunking import Chunk, Chunker
from blendrag.text.readers import Document, digest_of, read_documents, scan_inputs


class Encoder(Protocol):
    """What ingest needs of a model; loaded on first use."""

    @property
    def namespace(self) -> str:
        """Known without the weights where the corpus remembers it (unchanged checkpoint files)."""
        ...

    def chunk_ids(self, texts: Sequence[str]) -> list[tuple[int, ...]]: ...

    def encode(self, ids: Sequence[int]) -> ChunkKV: ...


@dataclass
class Totals:
    """Running totals, handed to the progress callback after every chunk."""

    total_bytes: int = 0
    done_bytes: int = 0
    documents: int = 0
    documents_unchanged: int = 0
    chunks: int = 0
    chunks_computed: int = 0
    chunks_skipped: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    encode_s: float = 0.0
    size_bytes: int = 0
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Computed tokens per second of encoding and storing; 0 when nothing was computed."""
        return self.computed_tokens / self.encode_s if self.encode_s else 0.0


Watch = Callable[[Totals], None]
Inputs = Sequence[Path | str] | Iterable[Document]


class Ingest:
    """One ingest run into one store and corpus."""

    def __init__(
        self,
        corpus: Corpus,
        store: KVStore,
        encoder: Encoder,
        embedder: Embedder,
        chunker: Callable[[], Chunker],
        prefix_ids: Sequence[int],
        watch: Watch | None = None,
    ) -> None:
        self._corpus = corpus
        self._store = store
        self._encoder = encoder
        self._embedder = embedder
        self._chunker = chunker
        self._prefix_ids = tuple(prefix_ids)
        self._watch = watch or (lambda totals: None)
        self.totals = Totals()
        self._scope: PinScope

    def run(self, inputs: Inputs) -> IngestReport:
        """Ingest paths or documents; Ctrl-C ends the run cleanly with ``interrupted`` set.

        What this run put or found is never evicted for its later puts: it stops instead.
        """
        began = time.perf_counter()
        interrupted, stopped = False, ""
        try:
            with self._store.pin_scope() as self._scope:
                for document in self._documents(inputs):
                    self._one(document)
        except StoreFullError as full:
            stopped = str(full)
        except KeyboardInterrupt:
            interrupted = True
        t = self.totals
        return IngestReport(
            documents=t.documents,
            documents_unchanged=t.documents_unchanged,
            chunks=t.chunks,
            chunks_computed=t.chunks_computed,
            chunks_skipped=t.chunks_skipped,
            failed=len(t.failures),
            tokens=t.tokens,
            tokens_per_s=t.tokens_per_s,
            bytes=t.size_bytes,
            seconds=time.perf_counter() - began,
            failures=tuple(t.failures),
            skipped=tuple(t.skipped),
            interrupted=interrupted,
            stopped=stopped,
        )

    # -- one document ---------------------------------------------------------------------------

    def _documents(self, inputs: Inputs) -> Iterator[Document]:
        yield from documents_of(inputs, self.totals)

    def _one(self, document: Document) -> None:
        """Bring one document up to date; a bad one is named and counted, never fatal."""
        digest = digest_of(document)
        try:
            known = self._corpus.unchanged(document.source, digest)
            if known is not None:
                computed = self._ensure_kv(document, known)
                self.totals.documents_unchanged += not computed
            else:
                chunks = self._chunker().split(document.text)
                if not chunks:
                    raise UnreadableDocumentError(document.source, "holds no text")
                self._ensure_kv(document, chunks)
                self._remember(document, digest, chunks)
        except InvalidInputError as bad:
            self._fail(document.source, bad)
            return
        self.totals.documents += 1
        self._watch(self.totals)

    def _ensure_kv(self, document: Document, chunks: Sequence[Chunk]) -> int:
        """Encode the chunks without stored KV; how many there were."""
        namespace = self._encoder.namespace
        computed = 0
        texts = [chunk.text for chunk in chunks]
        for chunk, ids in zip(chunks, self._encoder.chunk_ids(texts), strict=True):
            self.totals.chunks += 1
            self.totals.tokens += len(ids)
            key = chunk_key(namespace, self._prefix_ids, ids)
            if self._store.contains(namespace, key):
                self._scope.protect(namespace, key)
                self.totals.chunks_skipped += 1
                continue
            self._encode(document, chunk, ids, namespace, key)
            computed += 1
            self._watch(self.totals)
        return computed

    def _encode(
        self, document: Document, chunk: Chunk, ids: Sequence[int], namespace: str, key: str
    ) -> None:
        began = time.perf_counter()
        kv = self._encoder.encode(ids)
        try:
            self._store.put(namespace, key, kv)
        except InvalidInputError as bad:  # NaN or infinity: name where the text came from
            raise InvalidInputError(
                f"{document.source}, characters {chunk.start} to {chunk.end}: {bad}"
            ) from bad
        self.totals.encode_s += time.perf_counter() - began
        self.totals.chunks_computed += 1
        self.totals.computed_tokens += len(ids)
        self.totals.size_bytes += stored_chunk_bytes(kv.layout, kv.tokens)

    def _remember(self, document: Document, digest: str, chunks: Sequence[Chunk]) -> None:
        """Embed what is new, write the document's rows, drop KV that nothing refers to any more."""
        known = self._corpus.known_vectors(document.title, [c.chunk_id for c in chunks])
        new = [c for c in {c.chunk_id: c for c in chunks}.values() if c.chunk_id not in known]
        if new:  # else the embedder need not even be loaded
            vectors = self._embedder.embed([c.text for c in new], [document.title] * len(new))
            known |= {c.chunk_id: vector for c, vector in zip(new, vectors, strict=True)}
        import numpy as np

        before = self._corpus.chunks_of(document.source)
        rows = np.stack([known[c.chunk_id] for c in chunks])
        orphans = set(self._corpus.put_document(document, digest, chunks, rows))
        gone = [c for c in before if c.chunk_id in orphans]
        self.drop(gone)
        if gone:
            self._corpus.dropped.forget([c.chunk_id for c in gone])

    def drop(self, chunks: Sequence[Chunk]) -> int:
        """Delete the KV of ``chunks``; how many there were."""
        namespace = self._encoder.namespace
        ids = self._encoder.chunk_ids([c.text for c in chunks])
        keys = [chunk_key(namespace, self._prefix_ids, i) for i in ids]
        return sum(self._store.delete(namespace, key) for key in keys)

    def _fail(self, source: str, error: Exception) -> None:
        text = str(error)
        self.totals.failures.append(text if text.startswith(source) else f"{source}: {text}")


def documents_of(inputs: Inputs, totals: Totals) -> Iterator[Document]:
    """Documents of paths (or given ones), counting bytes, failures and skipped files in ``totals``."""
    paths, documents = _sorted_out(inputs)
    yield from documents
    found = scan_inputs(paths)
    totals.skipped += [f"{path}: unsupported suffix {path.suffix!r}" for path in found.unsupported]
    sizes = {path: _size(path) for path in found.files}
    totals.total_bytes += sum(sizes.values())
    for path in found.files:
        began = totals.done_bytes
        try:
            for document in read_documents(path):
                yield document
                read = totals.done_bytes + len(document.text.encode("utf-8", "replace"))
                totals.done_bytes = min(read, began + sizes[path])
        except UnreadableDocumentError as bad:
            totals.failures.append(str(bad))
        totals.done_bytes = began + sizes[path]


def _sorted_out(inputs: Inputs) -> tuple[list[Path], list[Document]]:
    paths: list[Path] = []
    documents: list[Document] = []
    for item in [inputs] if isinstance(inputs, str | Path) else inputs:
        if isinstance(item, Document):
            documents.append(item)
        else:
            paths.append(Path(item))
    return paths, documents


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
