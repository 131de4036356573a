"""``POST /v1/ingest``, ``GET`` and ``DELETE /v1/documents``: the documents of the store's corpus."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict

from blendrag.corpus.embedding_turns import Check, proceed
from blendrag.engine import BlendEngine, Document
from blendrag.errors import check_unicode
from blendrag.server.bodies import IngestBody
from blendrag.server.refusals import Refusal, wrong_field
from blendrag.server.replies import Fields
from blendrag.server.uploads import lines_of
from blendrag.text.names import MAX_TITLE_CHARS, check_metadata, check_name
from blendrag.wording import quoted

_REPORTED = (
    "documents", "documents_unchanged", "chunks", "chunks_computed", "tokens", "bytes", "seconds",
    "failed", "failures", "warnings",
)  # fmt: skip


def ingest(engine: BlendEngine, body: IngestBody, check: Check = proceed) -> Fields:
    """Store texts and their KV; returns what was done. Raises :class:`StoreFullError`.

    ``check`` may raise to end it after a chunk: documents that were stored by then stay.
    """
    if not body.documents:
        raise wrong_field("documents", "is empty; send at least one")
    for number, each in enumerate(body.documents):
        for name, text in (("source", each.source), ("text", each.text), ("title", each.title)):
            check_unicode(text or "", f"{name} of documents[{number}]")
        check_name(f"source of documents[{number}]", each.source)
        check_name(f"title of documents[{number}]", each.title or "", MAX_TITLE_CHARS)
        check_metadata(f"metadata of documents[{number}]", each.metadata)
        if not each.source.strip() or not each.text.strip():
            raise wrong_field(f"documents[{number}]", "has an empty source or text; fill both")
        if "\0" in each.source:
            raise Refusal(
                400,
                f"the source of documents[{number}] holds a NUL character; leave it out",
                param=f"documents[{number}].source",
            )
    given = [
        Document(each.source, each.text, each.title or "", each.metadata) for each in body.documents
    ]
    report = engine.ingest(given, lambda report: check()).whole()
    return {"object": "ingest", **{name: getattr(report, name) for name in _REPORTED}}


def document_list(engine: BlendEngine) -> bytes:
    """All documents with their sources, titles, chunks and tokens as JSON, written one by one: a long list
    holds the interpreter's lock only for a moment at a time."""
    corpus = engine.corpus
    found = [] if corpus is None else corpus.documents()
    objects = ({"object": "document", **asdict(each)} for each in found)
    written = ",".join(json.dumps(each, ensure_ascii=False) for each in objects)
    return f'{{"object":"list","data":[{written}]}}'.encode()


def delete_documents(
    engine: BlendEngine, sources: Sequence[str], cancelled: Collection[str] = ()
) -> Fields:
    """Remove :func:`documents_of` these sources."""
    removed = documents_of(engine, sources, cancelled)
    deleted = engine.remove_sources(removed) if removed else 0
    return {"object": "list", "deleted": deleted}


def documents_of(
    engine: BlendEngine, sources: Sequence[str], not_stored: Collection[str]
) -> list[str]:
    """Documents with these very sources, and all in uploaded JSON lines.

    Raises :class:`Refusal` 404 if a source has none and is not among those ``not_stored`` yet.
    """
    corpus = engine.corpus
    known = set() if corpus is None else {each.source for each in corpus.documents()}
    found = {each: [each] if each in known else lines_of(engine, each) for each in sources}
    if unknown := [each for each in sources if not found[each] and each not in not_stored]:
        raise Refusal(
            404,
            f"there is no document {quoted(unknown[0])}; GET /v1/documents lists all",
            param="source",
            code="document_not_found",
        )
    return [source for each in found.values() for source in each]
