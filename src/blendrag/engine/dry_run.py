"""What an ingest would do: chunks, bytes, and seconds estimated from timed samples. Writes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.languages import Languages
from blendrag.engine.ingest import IngestReport, Inputs, documents_of
from blendrag.engine.kv_namespace import KVNamespace
from blendrag.errors import UnsupportedModelError
from blendrag.fusor import gate, verdicts
from blendrag.serving.scheduler import Scheduler
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.text.chunking import Chunk
from blendrag.text.inputs import ALL, Patterns
from blendrag.text.readers import digest_of


@dataclass(frozen=True)
class DryRun:
    documents: int
    documents_unchanged: int
    chunks: int
    tokens: int
    bytes: int
    """Bytes of the KV that is not stored yet."""
    seconds: float
    """Of opening and, at first, checking and measuring the model, of computing KV and embedding."""
    failed: int
    failures: list[str]
    warnings: list[str]
    skipped: dict[str, list[str]]
    refused: str = ""
    """Why no KV of this model can be stored."""
    writer: str = ""
    """Fingerprint of the writer that would encode the chunks; empty if none would."""
    encode_after: int = 0
    """Most similar chunks that each would be encoded after."""
    largest: str = ""
    """The new document that has more than half of the tokens of several."""


def dry_run(
    kv: KVNamespace, scheduler: Scheduler, inputs: Inputs, patterns: Patterns = ALL
) -> DryRun:
    """See :meth:`BlendEngine.dry_run`."""
    corpus, chunker = kv.corpus.current, kv.corpus.chunker()
    if corpus is not None and corpus.manifest_or_none is not None:
        kv.corpus.check(corpus)
    report, unchanged, languages = IngestReport(warnings=kv.warnings()), 0, Languages()
    chunks: dict[str, Chunk] = {}
    unembedded: dict[str, Chunk] = {}
    replaced: list[str] = []
    most_tokens, largest = 0, ""
    for document, _ in documents_of(inputs, report, patterns):
        known = corpus and corpus.unchanged(document.source, digest_of(document))
        of_document = known or chunker.split(document.text, document.source)
        unchanged += bool(known)
        report.documents += 1
        languages.add("" if known else document.text)
        report.chunks += len(of_document)
        tokens = sum(chunk.tokens for chunk in of_document)
        report.tokens += tokens
        if not known:
            replaced.append(document.source)
            most_tokens, largest = max((most_tokens, largest), (tokens, document.source))
        chunks |= {chunk.chunk_id: chunk for chunk in of_document}
        unembedded |= {} if known else {chunk.chunk_id: chunk for chunk in of_document}
    report.warnings += filter(None, [languages.warning(kv.corpus.manifest.embedder)])
    size_bytes, seconds, refused = 0, 0.0, ""
    try:
        lacking = _lacking(kv, [*chunks.values()], is_new=corpus is None)
        if new := [*lacking]:
            similar = _similar_chunks(corpus, chunks.keys(), replaced, kv.recipe.encode_after)
            seconds = _encoding_s(kv, scheduler, new, similar)
        for chunk, variants in lacking.items():
            size_bytes += variants * stored_chunk_bytes(kv.layout, chunk.tokens)
    except UnsupportedModelError as exc:
        refused = str(exc)
    seconds += _embedding_s(kv, [*unembedded.values()]) if unembedded else 0.0
    return DryRun(
        documents=report.documents,
        documents_unchanged=unchanged,
        chunks=report.chunks,
        tokens=report.tokens,
        bytes=size_bytes,
        seconds=seconds,
        failed=len(report.failures),
        failures=report.failures,
        warnings=report.warnings,
        skipped=report.skipped,
        refused=refused,
        writer=kv.writer.fingerprint,
        encode_after=kv.recipe.encode_after,
        largest=largest if report.documents > 1 and 2 * most_tokens > report.tokens else "",
    )


def _lacking(kv: KVNamespace, chunks: Sequence[Chunk], is_new: bool) -> dict[Chunk, int]:
    """How many KV the chunks lack, without those that lack none."""
    if is_new:
        return dict.fromkeys(chunks, kv.recipe.variants)
    namespace = kv.name()
    keys = {chunk: set(kv.keys_of(namespace, chunk.text)) for chunk in chunks}
    found = kv.store.where(namespace, [*chain(*keys.values())]).keys()
    return {chunk: len(of - found) for chunk, of in keys.items() if of - found}


def _similar_chunks(
    corpus: Corpus | None, given: Set[str], replaced: Sequence[str], most: int
) -> int:
    """How many similar chunks each is encoded after, ``most`` at most: other chunks that are ``given``, and
    stored ones that have vectors, but for those of documents that are ``replaced``."""
    known = set(given)
    if corpus is not None and len(known) <= most:
        known |= corpus.searchable_ids(most + 1, replaced)
    return min(most, len(known) - 1)


def _encoding_s(kv: KVNamespace, scheduler: Scheduler, new: list[Chunk], similar: int) -> float:
    """Seconds to open and check the model and to compute the KV of ``new``, each after ``similar`` others.

    Raises :class:`UnsupportedModelError` for a model whose KV cannot be reused.
    """
    opening_s, adapter = _timed(lambda: kv.model.adapter)
    adapter.require_blendable()
    sample = [17] * max(chunk.tokens for chunk in new)

    def encode_s(tokens: int) -> float:
        with adapter.lock, kv.writer.active(adapter, kv.writer.fingerprint, 0, tokens):
            return _timed(lambda: adapter.encode((), sample[:tokens]))[0]

    scheduler.run(lambda: encode_s(len(sample)))  # warm up
    token_s = scheduler.run(lambda: encode_s(len(sample))) / len(sample)
    verdict = scheduler.run(lambda: verdicts.recall(adapter.identity.namespace, adapter.device))
    if verdict is not None and not verdict.blendable:
        raise UnsupportedModelError(f"{adapter.model_id}: {verdict.reason}")
    step_s = scheduler.run(lambda: encode_s(1))
    checking_s = kv.model.decode_weights.expected_s(step_s)
    if verdict is None:
        checking_s += gate.expected_s(adapter, token_s, step_s)
    # each is computed alone, with a writer, and together with those that it is encoded after
    times = 1 + bool(kv.recipe.writer) + (similar + 1) * (similar > 0)
    return checking_s + opening_s + token_s * times * sum(chunk.tokens for chunk in new)


def _embedding_s(kv: KVNamespace, chunks: list[Chunk]) -> float:
    first_s, _ = _timed(lambda: kv.corpus.embedder.embed([chunks[0].text]))
    each_s, _ = _timed(lambda: kv.corpus.embedder.embed([chunks[0].text]))
    return first_s + each_s * (len(chunks) - 1)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result
