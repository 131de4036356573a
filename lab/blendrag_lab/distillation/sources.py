"""Where the passages of a writer come from: an ingested corpus, files of documents, records of questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path, PurePath

import numpy as np

from blendrag.config import DEFAULT_EMBEDDER, settings
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.embedder import Embedder, check_embedder, embedder_of
from blendrag.corpus.retriever import Retriever
from blendrag.engine.rendering import prefix_token_ids
from blendrag.errors import InvalidInputError, UnreadableDocumentError
from blendrag.model.tokens import Tokens
from blendrag.text.chunking import Chunker
from blendrag.text.inputs import scan_inputs
from blendrag.text.limited_reading import read_documents
from blendrag.wording import quoted
from blendrag_lab.distillation.adapt import TrainingCorpus
from blendrag_lab.distillation.material import Group, documents_as_groups, with_nearest
from blendrag_lab.distillation.questions import read_questions

#: Nearest passages among which that of a question is looked for.
NEAREST = 3


def corpus_of(
    tokens: Tokens,
    store: Path | None,
    documents: Sequence[Path],
    questions: Sequence[Path],
    note: Callable[[str], None] = lambda text: None,
    top_k: int | None = None,
    chunk_tokens: int | None = None,
    embedder: str | None = None,
    encode_after: int | None = None,
    trust_remote_code: bool = False,
) -> TrainingCorpus:
    """The material that is named: documents, else the corpus of ``store``; ``None`` leaves only records.

    ``note`` gets a sentence for each file that cannot be read. Raises :class:`InvalidInputError` and
    :class:`CorpusError`.
    """
    k = top_k or settings().top_k
    if store is not None and not documents:
        with Corpus.open(store, read_only=True) as corpus:
            size = corpus.manifest.chunk_tokens
            if chunk_tokens not in (None, size):
                raise InvalidInputError(
                    f"store {store} holds chunks of {size} tokens, not {chunk_tokens}; leave --chunk-tokens "
                    "out, or train on documents"
                )
            more = embedder, encode_after, trust_remote_code
            return _of_store(corpus, store, tokens, questions, k, *more)
    size = chunk_tokens or settings().chunk_tokens
    chunker = Chunker(tokens.text, size)
    groups = _of_documents(documents, chunker, note) if documents else []
    name = embedder or settings().embedder or DEFAULT_EMBEDDER
    searched = Embedder(name, trust_remote_code=trust_remote_code)

    def retrieve(question: str) -> list[str]:
        vector = searched.embed_query(question)
        return [texts[n] for n in np.argsort(-(vectors @ vector), kind="stable")[:NEAREST]]

    alone, records = _questions(questions, chunker)
    if alone:
        if not groups:
            raise InvalidInputError(
                f"no passages are given for {quoted(alone[0], 60)}, expected records of {{question, ctxs}}, "
                "or --store or --documents that the questions are about"
            )
        texts = [passage.text for group in groups for passage in group.passages]
        vectors = searched.embed(texts)
    made = with_nearest(groups, alone, retrieve) if alone else tuple(groups)
    after = (settings().encode_after if encode_after is None else encode_after) or 0
    return TrainingCorpus((*made, *records), prefix_token_ids(tokens), size, k, after, searched)


def _of_store(
    corpus: Corpus,
    root: Path,
    tokens: Tokens,
    questions: Sequence[Path],
    top_k: int,
    named: str | None,
    encode_after: int | None,
    trust_remote_code: bool,
) -> TrainingCorpus:
    manifest = corpus.manifest
    if manifest.tokenizer_fingerprint != tokens.fingerprint:
        raise InvalidInputError(
            f"store {root} was ingested with model {manifest.model!r}, whose tokenizer is another one; use "
            "that model, or --documents"
        )
    groups = documents_as_groups(
        (source, PurePath(source).name, texts) for source, texts in _texts_of(corpus).items()
    )
    chunker = Chunker(tokens.text, manifest.chunk_tokens)
    alone, records = _questions(questions, chunker)
    made = tuple(groups)
    after = settings().encode_after if encode_after is None else encode_after
    after = manifest.encode_after if after is None else after
    embedder = None
    if alone or after:
        check_embedder(named, manifest, root)
        embedder = embedder_of(manifest, root, named, trust_remote_code)
    if alone:
        assert embedder is not None
        retriever = Retriever(corpus, embedder)
        made = with_nearest(
            groups, alone, lambda asked: [c.text for c in retriever.retrieve(asked, NEAREST)]
        )
    sizes = manifest.chunk_tokens, top_k, after
    return TrainingCorpus((*made, *records), manifest.prefix_ids, *sizes, embedder)


def _texts_of(corpus: Corpus) -> dict[str, list[str]]:
    """Texts of the chunks by source, in the order of their document. Entries with one source are together."""
    found = {s: [chunk.text for chunk in corpus.chunks_of(s)] for s in corpus.file_sources()}
    entries = corpus.entries.read(corpus.entries.ids())
    for entry, chunk in sorted(entries, key=lambda each: (each[0].source, each[0].start)):
        found.setdefault(entry.source, []).append(chunk.text)
    return found


def _of_documents(
    paths: Sequence[Path], chunker: Chunker, note: Callable[[str], None]
) -> list[Group]:
    def read() -> list[tuple[str, str, list[str]]]:
        found = []
        for path in scan_inputs(paths).files:
            try:
                for document in read_documents(path):
                    texts = [chunk.text for chunk in chunker.split(document.text, document.source)]
                    found.append((document.source, PurePath(document.source).name, texts))
            except UnreadableDocumentError as bad:
                note(str(bad))
        return found

    return documents_as_groups(read())


def _questions(paths: Sequence[Path], chunker: Chunker) -> tuple[list[str], list[Group]]:
    alone: list[str] = []
    records: list[Group] = []
    for path in paths:
        questions, groups = read_questions(path, chunker)
        alone += questions
        records += groups
    return alone, records
