"""Ingest by path: reader → chunks → KV → embedding → corpus.

Safe to interrupt and to repeat: KV is stored first, and a document's rows last, in one transaction.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from blendrag.corpus.corpus import Corpus, files_of, is_at, resolved
from blendrag.corpus.languages import Languages
from blendrag.engine.ingest_plan import (
    CHUNK_WORK,
    EMBEDDING_WORK,
    READ_AHEAD_CHARS,
    FilesRead,
    PlannedDocument,
    WorkAhead,
)
from blendrag.engine.kv_namespace import KVNamespace
from blendrag.engine.kv_writer import KVWriter, remember_namespace, with_loaded_identity
from blendrag.engine.neighbours import Neighbours
from blendrag.errors import (
    BlendragError,
    IdentityChangedError,
    InvalidInputError,
    StoreFullError,
    UnreadableDocumentError,
    UnsupportedModelError,
)
from blendrag.serving.scheduler import Scheduler
from blendrag.store.durable import readable_size
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.identity import NATIVE_ENCODING
from blendrag.text.chunking import Chunk
from blendrag.text.inputs import ALL, Patterns, scan_inputs
from blendrag.text.limited_reading import read_documents
from blendrag.text.names import short_name
from blendrag.text.readers import Document, check_document, digest_of
from blendrag.wording import log_step, quoted

log = logging.getLogger(__name__)

#: KV of this size is announced before it is computed.
ANNOUNCED_BYTES = 10**9


@dataclass
class IngestReport:
    """Totals of one ingest run. The progress callback gets them at every step, chunk and batch of vectors."""

    documents: int = 0
    documents_unchanged: int = 0
    chunks: int = 0
    chunks_computed: int = 0
    chunks_skipped: int = 0
    failed: int = 0
    tokens: int = 0
    context_tokens: int = 0
    """Tokens of other chunks that were computed again, because chunks are encoded after them."""
    embedded: int = 0
    """Chunks that were embedded before they were encoded, because they are encoded after one another."""
    tokens_per_s: float = 0.0
    """Stored tokens per second of encoding and storing; 0 if nothing was computed."""
    bytes: int = 0
    encoding_s: float = 0.0
    """Seconds of encoding and storing, a part of ``seconds``."""
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What needs attention: damaged characters, texts in a language that the embedder does not know."""
    skipped: dict[str, list[str]] = field(default_factory=dict)
    """Files of directories that were not read, by reason."""
    gone: list[str] = field(default_factory=list)
    """Documents of the given paths whose file or record no longer exists, or that were ``pruned``."""
    pruned: int = 0
    interrupted: bool = False
    stopped: str = ""
    """Why the run stopped early (store full), else empty."""
    refused: str = ""
    """Why no KV was stored: the model's cannot be reused. Empty if it can."""
    total_bytes: int = 0
    """Bytes of the given files, of which ``done_bytes`` are done."""
    done_bytes: int = 0
    work: float = 0.0
    """How much there is to do, in parts that take equal time, as far as it is known; ``work_done`` of it is
    done. What is stored already is no work."""
    work_done: float = 0.0
    read_bytes: int = 0
    """Bytes of the given files that were read."""
    measured: float | None = None
    """Once every document is stored: the share of the measurement of decode weights that is done, if the
    model needs one."""
    step: str = ""
    """What the run does now, such as ``reading a.pdf`` or ``encoding``; empty at its end."""

    def whole(self) -> IngestReport:
        """This report, if the run reached its end.

        Raises what ended it early: :class:`KeyboardInterrupt` or :class:`StoreFullError`.
        """
        if self.interrupted:
            raise KeyboardInterrupt
        if self.stopped:
            raise StoreFullError(self.stopped)
        return self


Watch = Callable[[IngestReport], None]
Inputs = Sequence[Path | str] | Iterable[Document]


def ingest(
    kv: KVNamespace,
    scheduler: Scheduler,
    inputs: Inputs,
    watch: Watch | None = None,
    prune: bool = False,
    patterns: Patterns = ALL,
) -> IngestReport:
    """See :meth:`BlendEngine.ingest`."""
    listed = listed_inputs(inputs)

    def run() -> IngestReport:
        try:
            return IngestRun(kv, scheduler, watch).run(listed, prune, patterns)
        except IdentityChangedError:
            if (corpus := kv.corpus.current) is not None:
                corpus.require_begun()  # another process began this corpus in another encoding
            raise

    report = with_loaded_identity(kv, run)
    if not (report.refused or kv.is_new):
        remember_namespace(kv, scheduler)
    return ended(kv, report)


def ended(kv: KVNamespace, report: IngestReport) -> IngestReport:
    """The report of a run. Raises :class:`UnsupportedModelError` if the model's KV was refused."""
    if report.refused:
        raise UnsupportedModelError(
            f"{report.refused}; documents stored without KV: {report.documents}; for KV, ingest with another "
            "model into another store"
        )
    kv.drop_orphaned()  # left by a run that was killed
    return report


class IngestRun:
    """One run. A store is created only once there is a document to store, and what it needs was opened."""

    _corpus: Corpus
    _rows: DocumentRows
    _neighbours: Neighbours | None

    def __init__(self, kv: KVNamespace, scheduler: Scheduler, watch: Watch | None = None) -> None:
        self._kv = kv
        self._watch = watch or (lambda report: None)
        self._writer = KVWriter(kv, scheduler, self._begin)
        self._languages = Languages()
        self._announced = False
        self._report = IngestReport()
        self._ahead = WorkAhead((), self._planned, FilesRead(), self._tell)
        self._counted = set[str]()
        """Ids of chunks without KV that some document has."""
        self._began = time.perf_counter()

    def run(self, inputs: Inputs, prune: bool = False, patterns: Patterns = ALL) -> IngestReport:
        """Ingest paths or documents. After Ctrl-C the report has ``interrupted`` set."""
        report, seen, reading = self._report, set(), FilesRead(begun=self._begin)
        with ended_early(report, self._writer.claim):
            found = documents_of(inputs, report, patterns, reading)
            first = [*islice(found, 1)]
            if first or not self._kv.is_new:
                self._open()
                report.warnings += self._kv.warnings()
                with self._writer.pinned():
                    self._ahead = WorkAhead(chain(first, found), self._planned, reading, self._tell)
                    documents: Iterable[PlannedDocument] = self._ahead
                    if self._neighbours is not None:
                        documents = self._embedded_first(documents, self._neighbours)
                    for planned in documents:
                        seen.add(resolved(planned.document.source))
                        self._ingest(planned)
                    report.done_bytes = report.total_bytes
                self._rows.find_gone(report, inputs, seen, reading.read, prune)
                self._writer.claim()
                self._writer.measure_decode_weights(self._measured)
        if report.documents:
            embedder = self._corpus.manifest.embedder
            report.warnings += filter(None, [self._languages.warning(embedder)])
        report.step = ""
        self._count()
        return report

    def _open(self) -> None:
        """Open what the run stores in, and create it if there is none."""
        if self._kv.is_new:
            self._begin("opening the embedder and the model")
        self._corpus = self._kv.create_corpus(encodes=True, embeds=True)
        self._rows = DocumentRows(self._kv, self._corpus)
        after = self._kv.recipe.encode_after
        self._neighbours = Neighbours(self._corpus, after) if after else None

    def _count(self) -> None:
        """Bring the derived totals up to date."""
        report, written = self._report, self._writer.written
        report.failed = len(report.failures)
        report.chunks_computed, report.bytes = written.chunks, written.size_bytes
        report.context_tokens = written.context_tokens
        report.tokens_per_s = written.tokens / written.seconds if written.seconds else 0.0
        report.encoding_s = written.seconds
        report.seconds = time.perf_counter() - self._began
        report.work = self._ahead.total

    def _measured(self, share: float) -> None:
        self._report.measured = share
        self._report.step = "measuring decode weights"
        self._tell()

    def _begin(self, step: str) -> None:
        if step != self._report.step:
            self._report.step = step
            self._tell()

    def _tell(self) -> None:
        self._count()
        self._watch(self._report)

    def _planned(self, document: Document, size_bytes: float) -> PlannedDocument:
        """``document`` cut into chunks, and which of them have no KV."""
        self._begin(f"splitting {file_name_of(document.source)}")
        digest = digest_of(document)
        try:
            known = self._corpus.unchanged(document.source, digest)
            chunks = known or self._kv.corpus.chunker().split(document.text, document.source)
            if not chunks:
                raise UnreadableDocumentError(document.source, "holds no text")
            missing = self._missing(chunks)
            tokens = [len(self._kv.model.text_ids(chunk.text)) for chunk in chunks]
        except InvalidInputError as bad:  # named when it is its turn
            return PlannedDocument(document, size_bytes, digest, bad=bad)
        new = missing - self._counted
        self._counted |= new
        sizes = {chunk.chunk_id: n for chunk, n in zip(chunks, tokens, strict=True)}
        only_embedded = not (known or new or self._neighbours is not None)
        return PlannedDocument(
            *(document, size_bytes, digest, chunks, tokens, missing),
            {chunk_id: sizes[chunk_id] + CHUNK_WORK for chunk_id in new},
            EMBEDDING_WORK * sum(tokens) * only_embedded,
        )

    def _embedded_first(
        self, documents: Iterable[PlannedDocument], neighbours: Neighbours
    ) -> Iterator[PlannedDocument]:
        """``documents``, each once all new chunks of its group are embedded. A group ends with the document
        that fills :data:`READ_AHEAD_CHARS`, so that a run does not hold all its texts."""
        held, held_chars = list[PlannedDocument](), 0
        for planned in documents:
            self._embed(planned, neighbours)
            held.append(planned)
            held_chars += len(planned.document.text)
            if held_chars >= READ_AHEAD_CHARS:
                yield from held
                held, held_chars = [], 0
                neighbours.forget_new()
        yield from held

    def _embed(self, planned: PlannedDocument, neighbours: Neighbours) -> None:
        """Embed the chunks of a document unless it is unchanged, and note them as neighbours."""
        document, chunks = planned.document, planned.chunks
        with suppress(InvalidInputError):  # raised again, and named, when it is its turn
            if chunks and self._corpus.unchanged(document.source, planned.digest) is None:
                titled = [(document.title, chunk) for chunk in chunks]
                self._begin("embedding")
                vectors = self._kv.corpus.vectors_of(self._corpus, titled, self._tell)
                neighbours.add(titled, vectors, replaces=document.source)
                self._report.embedded += len(chunks)
                self._tell()

    def _ingest(self, planned: PlannedDocument) -> None:
        """Bring one document up to date. A bad one is named and counted, and the run goes on."""
        document, report = planned.document, self._report
        bytes_before, work_before = report.done_bytes, report.work_done
        try:
            if planned.bad is not None:
                raise planned.bad
            known = self._corpus.unchanged(document.source, planned.digest)
            computed = self._write_kv(planned)
            if known is not None:
                report.documents_unchanged += not computed
            else:
                self._write_rows(document, planned.digest, planned.chunks)
                self._languages.add(document.text)
        except InvalidInputError as bad:
            report.failures.append(named_failure(document.source, bad))
            return
        finally:
            report.done_bytes = bytes_before + round(planned.size_bytes)
            report.work_done = work_before + planned.total
        report.documents += 1
        self._tell()

    def _write_kv(self, planned: PlannedDocument) -> int:
        """Store the KV of chunks that have none; returns how many. None of a model that is refused."""
        report, began = self._report, self._report.done_bytes
        computed, document = 0, planned.document
        for chunk, tokens in zip(planned.chunks, planned.tokens, strict=True):
            report.chunks += 1
            report.tokens += tokens
            is_new = chunk.chunk_id in planned.missing and self._write_chunk(document, chunk)
            report.done_bytes = began + round(planned.size_bytes * chunk.end / len(document.text))
            report.work_done += planned.work.get(chunk.chunk_id, 0.0)
            if is_new:
                computed += 1
                self._tell()
            else:
                report.chunks_skipped += not report.refused
        self._kv.store.flush()
        return computed

    def _missing(self, chunks: Sequence[Chunk]) -> set[str]:
        """Ids of the chunks without stored KV."""
        try:
            missing = () if self._report.refused else self._writer.missing(chunks)
            return {chunk.chunk_id for chunk in missing}
        except UnsupportedModelError as refused:
            self._report.refused = str(refused)
            return set()

    def _write_chunk(self, document: Document, chunk: Chunk) -> bool:
        """Store the KV of a chunk unless it has some by now; returns whether it had none."""
        try:
            # another process, or this document with an equal chunk, may have stored it meanwhile
            if self._report.refused or not self._writer.missing([chunk], ask_remote=False):
                return False
            if not self._announced:
                self._announce_size()
            self._kv.record_recipe()
            name = f"{document.source}, characters {chunk.start} to {chunk.end}"
            near = self._neighbours and self._neighbours.texts(document.title, chunk)
            self._writer.write(chunk, name, near or ())
        except UnsupportedModelError as refused:
            self._report.refused = str(refused)
        return not self._report.refused

    def _announce_size(self) -> None:
        """Say what will be stored if that is much: exactly, as far as documents were read."""
        self._announced = True
        ahead, layout, root = self._ahead, self._kv.layout, self._kv.root
        counted = ahead.chunk_tokens
        planned_bytes = sum(stored_chunk_bytes(layout, n) * of for n, of in counted.items())
        planned_bytes *= self._kv.recipe.variants
        needed_bytes = planned_bytes * (ahead.total / ahead.planned if ahead.planned else 1.0)
        if needed_bytes >= ANNOUNCED_BYTES:
            smaller = "; a new store in encoding int8 takes about half" * (
                layout.encoding == NATIVE_ENCODING and layout.dtype != "float32"
            )
            per_token = planned_bytes / max(1, sum(n * of for n, of in counted.items()))
            log_step(
                log,
                "the KV to be stored takes about %s in store %s, %s per token; the disk has %s free%s",
                *(readable_size(needed_bytes), root, readable_size(per_token)),
                *(readable_size(shutil.disk_usage(root).free), smaller),
            )

    def _write_rows(self, document: Document, digest: str, chunks: Sequence[Chunk]) -> None:
        """Embed new chunks, write the document's rows, drop KV that no row refers to any more."""
        titled = [(document.title, chunk) for chunk in chunks]
        embedded = self._neighbours.vectors(titled) if self._neighbours is not None else None
        self._begin("storing" if embedded else "embedding")
        vectors = embedded or self._kv.corpus.vectors_of(self._corpus, titled, self._tell)
        self._rows.put(document, digest, chunks, np.stack(vectors))


class DocumentRows:
    """The rows that one run changes in the corpus. Drops KV that no row refers to any more."""

    def __init__(self, kv: KVNamespace, corpus: Corpus) -> None:
        self._kv, self._corpus = kv, corpus
        # a relative path is the name that a text without a file was given
        self._files = [each for each in corpus.file_sources() if os.path.isabs(each)]

    def put(
        self, document: Document, digest: str, chunks: Sequence[Chunk], vectors: np.ndarray
    ) -> None:
        put = partial(self._corpus.put_document, document, digest, chunks, vectors)
        if self._kv.with_room(put):
            self._kv.drop_orphaned()

    def find_gone(
        self, report: IngestReport, inputs: Inputs, seen: set[str], read: set[str], prune: bool
    ) -> None:
        """Name, and with ``prune`` remove, documents of the given paths that no longer exist there."""
        roots = [os.path.realpath(each) for each in inputs if not isinstance(each, Document)]
        for source in self._files:
            name = resolved(source)
            if name in seen or not any(is_at(name, root) for root in roots):
                continue
            files = files_of(name)
            if not read.isdisjoint(files) or not any(map(os.path.lexists, files)):
                report.gone.append(source)
        for source in report.gone if prune else ():
            self._remove(source)
            report.pruned += 1

    def _remove(self, source: str) -> None:
        self._corpus.remove_source(source)
        self._kv.drop_orphaned()


@contextmanager
def ended_early(report: IngestReport, claim: Callable[[], None]) -> Iterator[None]:
    """Note in ``report`` that Ctrl-C or a full store ends a run here, and claim its KV in any case."""
    is_whole = False
    try:
        yield
        is_whole = True
    except StoreFullError as full:
        report.stopped = str(full)
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        try:
            claim()
        except BlendragError as error:
            if is_whole:
                raise
            log.info("blendrag store gc --remote may remove KV of this ingest: %s", error)


def named_failure(source: str, bad: Exception) -> str:
    """The error of a document, which names the document."""
    text = str(bad)
    return text if text.startswith(source) else f"{short_name(source)}: {text}"


def remove(kv: KVNamespace, paths: Sequence[Path | str]) -> int:
    """See :meth:`BlendEngine.remove`."""
    corpus = kv.corpus.require()
    sources: list[str] = []
    for path in paths:
        found = corpus.sources_of(path)
        if not found:
            raise InvalidInputError(
                f"{path} is not in the corpus of {kv.root}; "
                "expected a path that blendrag list shows"
            )
        sources += found
    return remove_sources(kv, sources)


def remove_sources(kv: KVNamespace, sources: Iterable[str]) -> int:
    """Remove the documents with these very sources: texts, vectors and KV. Returns how many."""
    corpus = kv.corpus.require()
    known = dict.fromkeys(sources)
    for source in known:
        corpus.remove_source(source)
        kv.drop_orphaned()
    return len(known)


def listed_inputs(inputs: Inputs) -> list[Any]:
    """Paths and documents; a single one, too. Raises :class:`InvalidInputError` for anything else."""
    is_single = isinstance(inputs, str | Document) or not isinstance(inputs, Iterable)
    listed = [inputs] if is_single else [*inputs]
    for each in listed:
        if not isinstance(each, str | os.PathLike | Document):
            raise InvalidInputError(
                f"{quoted(each, 60)} cannot be ingested, expected a path or a Document; give one of them"
            )
    return listed


def documents_of(
    inputs: Inputs, report: IngestReport, patterns: Patterns = ALL, reading: FilesRead | None = None
) -> Iterator[tuple[Document, float]]:
    """Given documents and those of given paths, whose sources are their resolved paths.

    Each with its share of its file's bytes. Counts failures and skipped files in ``report``, and files in
    ``reading``.
    """
    reading = reading or FilesRead()
    given = listed_inputs(inputs)
    for each in given:
        if isinstance(each, Document):
            try:
                check_document(each)
            except InvalidInputError as bad:
                report.failures.append(named_failure(each.source, bad))
            else:
                yield each, 0.0
    paths = [Path(each) for each in given if not isinstance(each, Document)]
    files = files_at(paths, report, patterns)
    for path, size_bytes in files.values():
        reading.unread[path.suffix] += size_bytes
    for name, (path, size_bytes) in files.items():
        reading.begun(f"reading {path.name}")
        documents, failure = documents_in(path, name, size_bytes)
        reading.kind = path.suffix
        report.read_bytes += size_bytes
        reading.unread[path.suffix] -= size_bytes
        if failure:
            report.failures.append(failure)
        else:
            reading.read.add(name)
        report.warnings += damage_of(documents)
        yield from documents


def files_at(
    paths: Sequence[Path], report: IngestReport, patterns: Patterns
) -> dict[str, tuple[Path, int]]:
    """The files at these paths, by resolved name: path and size in bytes. Counts in ``report``."""
    found = scan_inputs(paths, patterns)
    report.skipped = found.skipped
    named = {os.path.realpath(path): path for path in reversed(found.files)}
    files = {name: (path, _size(path)) for name, path in reversed(named.items())}
    report.total_bytes += sum(size_bytes for _, size_bytes in files.values())
    return files


def documents_in(
    path: Path, name: str, size_bytes: int
) -> tuple[list[tuple[Document, float]], str]:
    """The documents of one file, each with its share of the bytes, and why reading it ended early, if it did.

    Sources begin with ``name``.
    """
    documents, failure = list[Document](), ""
    try:
        for document in read_documents(path):
            documents.append(document)
    except UnreadableDocumentError as bad:
        failure = str(bad)
    characters = sum(len(document.text) for document in documents)
    return [
        (
            replace(document, source=name + document.source.removeprefix(path.as_posix())),
            size_bytes * len(document.text) / characters,
        )
        for document in documents
    ], failure


def damage_of(documents: Iterable[tuple[Document, float]]) -> list[str]:
    return [document.damage for document, _ in documents if document.damage]


def file_name_of(source: str) -> str:
    return source.partition("#")[0].rpartition("/")[2]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
