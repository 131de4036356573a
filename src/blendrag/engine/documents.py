"""What an engine does with documents rather than prompts: ingest, remove, count beforehand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blendrag.engine.encoding import Encoder
from blendrag.engine.ingest import Ingest, Inputs, Totals, Watch, documents_of
from blendrag.engine.orphans import drop_orphaned_kv
from blendrag.engine.resources import Resources
from blendrag.engine.types import DryRun, IngestReport
from blendrag.engine.worker import Worker
from blendrag.errors import IdentityChangedError, InvalidInputError
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.text.readers import digest_of


def ingest(
    resources: Resources, worker: Worker, inputs: Inputs, watch: Watch | None = None
) -> IngestReport:
    """See :meth:`BlendEngine.ingest`."""
    corpus = resources.create_corpus()
    listed: list[Any] = [inputs] if isinstance(inputs, str | Path) else list(inputs)

    def run() -> IngestReport:
        return Ingest(
            corpus,
            resources.store,
            Encoder(resources, worker),
            resources.embedder,
            resources.chunker,
            resources.prefix_ids,
            watch,
        ).run(listed)

    unloaded = not resources.is_loaded
    try:
        report = run()
    except IdentityChangedError:
        corpus.require_begun()  # it was not the model that changed, but how the store keeps KV
        if not unloaded:
            raise
        report = run()  # the files looked unchanged but hold other weights: now they are loaded
    resources.remember_namespace()
    drop_orphaned_kv(resources, corpus)  # of what a crash left behind
    return report


def remove(resources: Resources, paths: Sequence[Path | str]) -> int:
    """See :meth:`BlendEngine.remove`."""
    corpus = resources.require_corpus()
    sources: dict[str, None] = {}
    for path in paths:
        found = corpus.sources_of(path)
        if not found:
            raise InvalidInputError(
                f"{path} is not in the corpus of {resources.root}; "
                "expected a path as it was ingested"
            )
        sources |= dict.fromkeys(found)
    for source in sources:
        corpus.remove_source(source)
        drop_orphaned_kv(resources, corpus)
    return len(sources)


def dry_run(resources: Resources, worker: Worker, inputs: Inputs) -> DryRun:
    """See :meth:`BlendEngine.dry_run`."""
    known = resources.corpus
    chunker = resources.chunker()
    totals = Totals()
    documents = chunks = tokens = new = 0
    for document in documents_of(inputs, totals):
        pieces = chunker.split(document.text)
        documents += 1
        chunks += len(pieces)
        tokens += sum(c.tokens for c in pieces)
        if known is None or known.document_digest(document.source) != digest_of(document):
            new += sum(c.tokens for c in pieces)
    adapter = resources.adapter
    adapter.require_blendable()
    sample = [17] * min(resources.chunk_tokens, max(tokens, 1))

    def encode_s() -> float:
        with adapter.lock:
            began = time.perf_counter()
            adapter.encode((), sample)
            return time.perf_counter() - began

    worker.run(encode_s)  # the first one warms up
    rate = len(sample) / worker.run(encode_s)
    return DryRun(
        documents, chunks, tokens, stored_chunk_bytes(resources.layout, tokens), new / rate,
        len(totals.failures), tuple(totals.failures), tuple(totals.skipped),
    )  # fmt: skip
