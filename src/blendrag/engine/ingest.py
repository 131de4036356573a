"""Ingest by path: reader → chunks → KV → embedding → corpus.

Safe to interrupt and to repeat: KV is stored first, and a document's rows last, in one transaction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from blendrag.corpus.corpus import Corpus, files_of, is_at, resolved
from blendrag.engine.kv_writer import KVWriter, drop_orphaned_kv, with_loaded_identity
from blendrag.engine.resources import Resources
from blendrag.engine.worker import Worker
from blendrag.errors import (
    IdentityChangedError,
    InvalidInputError,
    StoreFullError,
    UnreadableDocumentError,
    UnsupportedModelError,
)
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.text.chunking import Chunk
from blendrag.text.readers import Document, digest_of, read_documents, scan_inputs


@dataclass
class IngestReport:
    """Totals of one ingest run, passed to the progress callback after every chunk."""

    documents: int = 0
    documents_unchanged: int = 0
    chunks: int = 0
    chunks_computed: int = 0
    chunks_skipped: int = 0
    failed: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    """Computed tokens per second of encoding and storing; 0 if nothing was computed."""
    bytes: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    """Documents of the given paths whose file or record no longer exists, or that were ``pruned``."""
    pruned: int = 0
    interrupted: bool = False
    stopped: str = ""
    """Why the run stopped early (store full), else empty."""
    refused: str = ""
    """Why no KV was stored: the model's cannot be reused. Empty if it can."""
    total_bytes: int = 0
    """Bytes of the given files; ``done_bytes`` of them were read."""
    done_bytes: int = 0

    def whole(self) -> IngestReport:
        """This report, if the run reached its end.

        Raises what ended it early: :class:`KeyboardInterrupt` or :class:`StoreFullError`.
        """
        if self.interrupted:
            raise KeyboardInterrupt
        if self.stopped:
            raise StoreFullError(self.stopped)
        return self


@dataclass(frozen=True)
class DryRun:
    documents: int
    chunks: int
    tokens: int
    bytes: int
    seconds: float
    failed: int
    failures: list[str]
    skipped: list[str]


Watch = Callable[[IngestReport], None]
Inputs = Sequence[Path | str] | Iterable[Document]


def ingest(
    resources: Resources,
    worker: Worker,
    inputs: Inputs,
    watch: Watch | None = None,
    prune: bool = False,
) -> IngestReport:
    """See :meth:`BlendEngine.ingest`."""
    corpus = resources.create_corpus()
    listed: list[Any] = [inputs] if isinstance(inputs, str | Path) else list(inputs)

    def run() -> IngestReport:
        try:
            return IngestRun(resources, worker, corpus, watch).run(listed, prune)
        except IdentityChangedError:
            corpus.require_begun()  # another process began this corpus in another encoding
            raise

    report = with_loaded_identity(resources, run)
    if report.refused:
        raise UnsupportedModelError(
            f"{report.refused}; {report.documents} documents were stored without KV: ask with --mode full, "
            "or ingest with another --model into another --store"
        )
    resources.remember_namespace()
    drop_orphaned_kv(resources, corpus)  # left by a run that was killed
    return report


class IngestRun:
    def __init__(
        self, resources: Resources, worker: Worker, corpus: Corpus, watch: Watch | None = None
    ) -> None:
        self._resources = resources
        self._corpus = corpus
        self._watch = watch or (lambda report: None)
        self._writer = KVWriter(resources, worker)
        self._report = IngestReport()
        self._began = time.perf_counter()
        # sources of earlier versions are paths as they were spelled, so one file may have several
        self._known: dict[str, list[str]] = {}
        for source in corpus.file_sources():
            self._known.setdefault(resolved(source), []).append(source)

    def run(self, inputs: Inputs, prune: bool = False) -> IngestReport:
        """Ingest paths or documents. After Ctrl-C the report has ``interrupted`` set."""
        report, seen, read = self._report, set(), set[str]()
        try:
            with self._writer.pinned():
                for document in documents_of(inputs, report, read):
                    seen.add(resolved(document.source))
                    self._ingest(document)
            self._find_gone(inputs, seen, read, prune)
        except StoreFullError as full:
            report.stopped = str(full)
        except KeyboardInterrupt:
            report.interrupted = True
        self._count()
        return report

    def _find_gone(self, inputs: Inputs, seen: set[str], read: set[str], prune: bool) -> None:
        """Name, and with ``prune`` remove, documents of the given paths that no longer exist there."""
        roots = [os.path.realpath(each) for each in inputs if not isinstance(each, Document)]
        for name, sources in self._known.items():
            if name in seen or not any(is_at(name, root) for root in roots):
                continue
            files = files_of(name)
            if not read.isdisjoint(files) or not any(map(os.path.lexists, files)):
                self._report.gone += sources
        for source in self._report.gone if prune else ():
            self._remove(source)
            self._report.pruned += 1

    def _remove(self, source: str) -> None:
        self._corpus.remove_source(source)
        drop_orphaned_kv(self._resources, self._corpus)

    def _count(self) -> None:
        """Bring the derived totals up to date."""
        report, written = self._report, self._writer.written
        report.failed = len(report.failures)
        report.chunks_computed, report.bytes = written.chunks, written.size_bytes
        report.tokens_per_s = written.tokens / written.seconds if written.seconds else 0.0
        report.seconds = time.perf_counter() - self._began

    def _tell(self) -> None:
        self._count()
        self._watch(self._report)

    def _ingest(self, document: Document) -> None:
        """Bring one document up to date. A bad one is named and counted, and the run goes on."""
        digest = digest_of(document)
        try:
            known = self._corpus.unchanged(document.source, digest)
            if known is not None:
                computed = self._write_kv(document, known)
                self._report.documents_unchanged += not computed
            else:
                chunks = self._resources.chunker().split(document.text)
                if not chunks:
                    raise UnreadableDocumentError(document.source, "holds no text")
                self._write_kv(document, chunks)
                self._write_rows(document, digest, chunks)
            for other in self._known.get(resolved(document.source), ()):
                if other != document.source:  # another spelling, which this one replaces
                    self._remove(other)
        except InvalidInputError as bad:
            text = str(bad)
            named = text.startswith(document.source)
            self._report.failures.append(text if named else f"{document.source}: {text}")
            return
        self._report.documents += 1
        self._tell()

    def _write_kv(self, document: Document, chunks: Sequence[Chunk]) -> int:
        """Store the KV of chunks that have none; returns how many. None of a model that is refused."""
        computed = 0
        for chunk in chunks:
            self._report.chunks += 1
            self._report.tokens += len(self._resources.text_ids(chunk.text))
            if self._report.refused:
                continue
            try:
                if not self._writer.missing([chunk]):
                    self._report.chunks_skipped += 1
                    continue
                name = f"{document.source}, characters {chunk.start} to {chunk.end}"
                self._writer.write(chunk, name)
            except UnsupportedModelError as refused:
                self._report.refused = str(refused)
                continue
            computed += 1
            self._tell()
        return computed

    def _write_rows(self, document: Document, digest: str, chunks: Sequence[Chunk]) -> None:
        """Embed new chunks, write the document's rows, drop KV that no row refers to any more."""
        titled = [(document.title, chunk) for chunk in chunks]
        vectors = np.stack(self._resources.vectors_of(self._corpus, titled))
        if self._corpus.put_document(document, digest, chunks, vectors):
            drop_orphaned_kv(self._resources, self._corpus)


def remove(resources: Resources, paths: Sequence[Path | str]) -> int:
    """See :meth:`BlendEngine.remove`."""
    corpus = resources.require_corpus()
    sources: dict[str, None] = {}
    for path in paths:
        found = corpus.sources_of(path)
        if not found:
            raise InvalidInputError(
                f"{path} is not in the corpus of {resources.root}; "
                "expected a path that blendrag list shows"
            )
        sources |= dict.fromkeys(found)
    for source in sources:
        corpus.remove_source(source)
        drop_orphaned_kv(resources, corpus)
    return len(sources)


def dry_run(resources: Resources, worker: Worker, inputs: Inputs) -> DryRun:
    """See :meth:`BlendEngine.dry_run`."""
    corpus = resources.corpus
    chunker = resources.chunker()
    report = IngestReport()
    new_tokens = 0
    for document in documents_of(inputs, report):
        chunks = chunker.split(document.text)
        tokens = sum(chunk.tokens for chunk in chunks)
        report.documents += 1
        report.chunks += len(chunks)
        report.tokens += tokens
        if corpus is None or corpus.unchanged(document.source, digest_of(document)) is None:
            new_tokens += tokens
    adapter = resources.adapter
    adapter.require_blendable()
    sample = [17] * min(resources.manifest.chunk_tokens, max(report.tokens, 1))

    def encode_s() -> float:
        with adapter.lock:
            began = time.perf_counter()
            adapter.encode((), sample)
            return time.perf_counter() - began

    worker.run(encode_s)  # warm up
    seconds_per_token = worker.run(encode_s) / len(sample)
    return DryRun(
        documents=report.documents,
        chunks=report.chunks,
        tokens=report.tokens,
        bytes=stored_chunk_bytes(resources.layout, report.tokens),
        seconds=new_tokens * seconds_per_token,
        failed=len(report.failures),
        failures=report.failures,
        skipped=report.skipped,
    )


def documents_of(
    inputs: Inputs, report: IngestReport, read: set[str] | None = None
) -> Iterator[Document]:
    """Given documents and those of given paths, whose sources are their resolved paths.

    Counts bytes, failures and skipped files in ``report``; ``read`` gets the files read to their end.
    """
    given: list[Any] = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    yield from (each for each in given if isinstance(each, Document))
    found = scan_inputs([Path(each) for each in given if not isinstance(each, Document)])
    report.skipped += [f"{path}: unsupported suffix {path.suffix!r}" for path in found.unsupported]
    files = {os.path.realpath(path): path for path in reversed(found.files)}
    sizes = {path: _size(path) for path in files.values()}
    report.total_bytes += sum(sizes.values())
    for name, path in reversed(files.items()):
        began = report.done_bytes
        try:
            for document in read_documents(path):
                record = document.source.removeprefix(path.as_posix())
                yield replace(document, source=name + record)
                done = report.done_bytes + len(document.text.encode("utf-8", "replace"))
                report.done_bytes = min(done, began + sizes[path])
            if read is not None:
                read.add(name)
        except UnreadableDocumentError as bad:
            report.failures.append(str(bad))
        report.done_bytes = began + sizes[path]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
