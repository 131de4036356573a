"""The corpus and the store of one directory, as one model may use them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from blendrag.config import DEFAULT_EMBEDDER, Settings, of_variable, variable_of
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.database import DIRECTORY, FILE_NAME, EmptyDatabase
from blendrag.corpus.embedder import Embedder, absolute_embedder, check_embedder, embedder_of
from blendrag.corpus.embedding_turns import Check, EmbeddingTurns, proceed
from blendrag.corpus.manifest import Manifest
from blendrag.corpus.reranker import Reranker
from blendrag.corpus.retriever import Retriever
from blendrag.engine.lazy_model import LazyModel, opened
from blendrag.engine.rendering import daily_part, prefix_token_ids
from blendrag.errors import CorpusError, InvalidInputError
from blendrag.model.tokens import Tokens
from blendrag.serving.scheduler import CLOSED
from blendrag.store.records import recorded_namespaces
from blendrag.store.remote.tier import RemoteTier
from blendrag.store.tiered import KVStore, open_store
from blendrag.text.chunking import Chunk, Chunker

logger = logging.getLogger(__name__)

#: Ends the name of the record of a namespace's prompt schemas.
SCHEMA_RECORDS = "schemas"
#: The manifest as it is kept, and whether there are documents, for which it then holds.
CorpusState = tuple[Manifest | None, bool]


@dataclass(frozen=True)
class CorpusSettings:
    """Corpus settings that the caller named; ``None`` takes the default or what the corpus has."""

    prefix_text: str | None = None
    encode_prefix: bool = True
    chunk_tokens: int | None = None
    embedder: str | None = None
    kv_encoding: str | None = None

    def __post_init__(self) -> None:
        if self.prefix_text and not self.encode_prefix:
            raise InvalidInputError(
                f"prefix_text {self.prefix_text[:40]!r} with encode_prefix=False, expected one of them; "
                "leave out prefix_text to encode chunks without a prefix"
            )

    def manifest(self, model: str, tokens: Tokens, defaults: Settings) -> Manifest:
        """The manifest of a new corpus without KV."""
        prefix_ids: tuple[int, ...] = ()
        if self.prefix_text:
            prefix_ids = tuple(tokens.encode_template(self.prefix_text))
        elif self.encode_prefix:
            prefix_ids = prefix_token_ids(tokens)
        return Manifest(
            model=model,
            model_signature="",
            tokenizer_fingerprint=tokens.fingerprint,
            namespace="",
            chunk_tokens=self.chunk_tokens or defaults.chunk_tokens,
            prefix_ids=prefix_ids,
            prefix_text=self.prefix_text or "",
            embedder=absolute_embedder(defaults.embedder or DEFAULT_EMBEDDER),
            encoding=defaults.kv_encoding,
        )

    def check(self, manifest: Manifest, root: Path) -> None:
        """Raise :class:`InvalidInputError` if the corpus at ``root`` has other settings."""
        check_embedder(self.embedder, manifest, root)
        wrong = ""
        if self.chunk_tokens not in (None, manifest.chunk_tokens):
            wrong = f"holds chunks of {manifest.chunk_tokens} tokens, not {self.chunk_tokens}"
        elif self.prefix_text not in (None, manifest.prefix_text):
            wrong = "was ingested with another prefix"
        elif self.kv_encoding not in (None, manifest.encoding):
            wrong = f"keeps KV in encoding {manifest.encoding}, not {self.kv_encoding}"
        elif manifest.prefix_ids and not self.encode_prefix:
            tokens = len(manifest.prefix_ids)
            wrong = f"was ingested with a prefix of {tokens} tokens, not without one"
        if wrong:
            raise InvalidInputError(f"store {root} {wrong}; use that, or ingest into another store")


_looks: ContextVar[dict[ModelCorpus, CorpusState | None]] = ContextVar("blendrag_looks")
"""What was seen within :meth:`ModelCorpus.one_look`."""


class ModelCorpus:
    """The corpus in the store's directory, and the store. Opening them is thread-safe."""

    def __init__(
        self,
        model: LazyModel,
        root: Path,
        settings: Settings,
        corpus_settings: CorpusSettings,
        read_only: bool = False,
        manifest: Manifest | None = None,
    ) -> None:
        """``manifest``: of the corpus that another process keeps for this one."""
        self._model = model
        self.root = root
        self.settings = settings
        self._corpus_settings = corpus_settings
        self.read_only = read_only
        self._given_manifest = manifest
        self.embedding_turns = EmbeddingTurns()
        self._opens = threading.RLock()
        self._corpus: Corpus | None = None
        self._closed = False

    def _refuse_closed(self) -> None:
        if self._closed:
            raise InvalidInputError(CLOSED)

    @opened
    def store(self) -> KVStore:
        self._refuse_closed()
        s = self.settings
        remote = None
        if s.remote is not None:
            remote = partial(RemoteTier, s.remote, s.remote_key, s.remote_timeout_s)
        return open_store(
            self.root, s.ram_bytes, s.disk_bytes, read_only=self.read_only, remote=remote
        )

    # -- the corpus -------------------------------------------------------------------------------

    @property
    def current(self) -> Corpus | None:
        """The corpus, ``None`` before the first ingest. Raises :class:`InvalidInputError` once closed."""
        self._refuse_closed()
        if self._corpus is None:
            with self._opens:
                self._corpus = self._corpus or self._found()  # another process may create one
        return self._corpus

    def _found(self) -> Corpus | None:
        try:
            corpus = Corpus.open(self.root, read_only=self.read_only)
        except EmptyDatabase:  # another process is creating it
            return None
        except CorpusError:
            if os.path.lexists(self.root / DIRECTORY / FILE_NAME):
                raise
            return None
        if len(corpus) and corpus.manifest_or_none is None:
            corpus.close()
            raise CorpusError(
                f"the corpus at {corpus.directory} has lost its manifest; "
                "delete that directory and ingest again, which finds the stored KV"
            )
        return corpus

    def _lost(self) -> str:
        """A clause for errors if the store has KV but no corpus, else empty."""
        made = os.path.lexists(self.root / "format")
        entries = 0
        if made and self.current is None and (entries := self.store.stats().entries):
            entries -= sum(
                1
                for each in recorded_namespaces(self.root, SCHEMA_RECORDS)
                for _ in self.store.keys(each)
            )
        return f"store {self.root} holds the KV of {entries} chunks but no corpus" * bool(entries)

    def usable(self) -> tuple[Corpus | None, str]:
        """The corpus if it was ingested with this model's tokenizer; else ``None`` and the reason."""
        corpus = self.current
        if os.path.lexists(self.root / DIRECTORY) and (lost := self._lost()):
            return None, f"{lost}, so nothing of it is reused; ingest the documents again"
        manifest, has_documents = self._looked()
        if corpus is None or manifest is None:
            return None, ""
        if manifest.tokenizer_fingerprint == self._model.tokens.fingerprint:
            return corpus, ""
        if not has_documents:
            return None, ""
        return None, (
            f"store {self.root} was ingested with {self._model_of(manifest)}, so nothing of it is reused "
            f"with {self._model.name!r}"
        )

    def _model_of(self, manifest: Manifest) -> str:
        """The model of ``manifest``, whose tokenizer is not this one's."""
        of = "" if manifest.model != self._model.name else " and another tokenizer than it has now"
        return f"model {manifest.model!r}{of}"

    def require(self) -> Corpus:
        """The corpus of this model. Raises :class:`CorpusError` or :class:`InvalidInputError`."""
        if lost := self._lost():
            raise CorpusError(f"{lost}; ingest the documents again, which finds the KV")
        corpus = self.current or Corpus.open(self.root)
        self._check_owner(self._looked()[0] or corpus.manifest)
        return corpus

    def create(self) -> Corpus:
        """The corpus to ingest into, created with this engine's settings if there is none."""
        self._refuse_closed()
        _ = self.store  # makes the root, with its checks
        with self._opens:
            corpus = self.current
            if corpus is None:
                if lost := self._lost():
                    logger.warning(
                        "%s: creating a new one; ingest all documents again if there was one", lost
                    )
                corpus = self._corpus = Corpus.open(self.root, create=True)
        corpus.begin(self.manifest)
        self.check(corpus)
        return corpus

    def check(self, corpus: Corpus) -> None:
        """Raise :class:`InvalidInputError` if ``corpus`` has another model or other settings."""
        manifest = corpus.manifest
        self._check_owner(manifest)
        self._corpus_settings.check(manifest, self.root)

    def ignored_settings(self, manifest: Manifest) -> list[str]:
        """Settings of a new corpus that the environment names, where this one has others."""
        own = {"chunk_tokens": manifest.chunk_tokens, "kv_encoding": manifest.encoding}
        return [
            f"{variable_of(name)} {given} ignored: store {self.root} has {name} {own[name]}; ingest into "
            "another store to use it"
            for name in own
            if (given := getattr(self.settings, name)) != own[name] and of_variable(name, given)
        ]

    def _check_owner(self, manifest: Manifest) -> None:
        if manifest.tokenizer_fingerprint != self._model.tokens.fingerprint:
            raise InvalidInputError(
                f"store {self.root} was ingested with {self._model_of(manifest)}, not {self._model.name!r}; "
                "use that model, or ingest into another store"
            )

    # -- its settings -----------------------------------------------------------------------------

    @contextmanager
    def one_look(self) -> Iterator[None]:
        """Within it, the settings are looked at once: a request goes by one state of them. Requests that take
        turns on one thread have contexts of their own (:class:`~blendrag.serving.coroutine.Coroutine`)."""
        looks = _looks.get({})
        if self in looks:
            yield
            return
        token = _looks.set({**looks, self: None})
        try:
            yield
        finally:
            _looks.reset(token)

    def _looked(self) -> CorpusState:
        """What holds within :meth:`one_look`, or now."""
        looks = _looks.get({})
        if (found := looks.get(self)) is None:
            corpus = self.current
            found = corpus.state() if corpus is not None else (None, False)
            if self in looks:
                looks[self] = found
        return found

    @property
    def manifest(self) -> Manifest:
        """The corpus's manifest; one with this engine's settings while the corpus has no documents."""
        return self._given_manifest or self.settled_manifest or self._unsettled()

    @property
    def settled_manifest(self) -> Manifest | None:
        """The manifest of a corpus with documents; the settings of any other may still change."""
        manifest, has_documents = self._looked()
        return manifest if has_documents else None

    def _unsettled(self) -> Manifest:
        """With the recipe by which chunks may have been stored before an ingest was killed."""
        kept, new = self.recorded_manifest, self._new_manifest
        if kept is None or kept.model != new.model:
            return new
        return replace(new, writer=kept.writer, encode_after=kept.encode_after)

    @property
    def recorded_manifest(self) -> Manifest | None:
        """The manifest as it is kept, also without documents."""
        return self._given_manifest or self._looked()[0]

    @opened
    def _new_manifest(self) -> Manifest:
        model = self._model
        return self._corpus_settings.manifest(model.name, model.tokens, self.settings)

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids of the prefix that the corpus's chunks are encoded after."""
        return self.manifest.prefix_ids

    @opened
    def _undated_tokens(self) -> int:
        """How many tokens of the prefix precede what the chat template changes from day to day."""
        prefix, tokens = self.prefix_ids, self._model.tokens
        is_head = bool(prefix) and prefix == prefix_token_ids(tokens)
        return daily_part(tokens) if is_head else len(prefix)

    @property
    def is_dated(self) -> bool:
        """Whether prompts have another head than the prefix, because it contains today's date."""
        return self._undated_tokens < len(self.prefix_ids)

    @property
    def undated_ids(self) -> tuple[int, ...]:
        """The prefix up to today's date, whose KV is stored by itself, because it is exact every day.

        Empty if there is no date, or too soon.
        """
        same = self._undated_tokens
        is_worth = self.is_dated and same >= self.settings.prefix_min_tokens
        return self.prefix_ids[:same] if is_worth else ()

    def chunker(self) -> Chunker:
        return Chunker(self._model.tokens.text, self.manifest.chunk_tokens)

    # -- retrieval --------------------------------------------------------------------------------

    @opened
    def embedder(self) -> Embedder:
        manifest, given = self.settled_manifest, self.settings.embedder
        trusted, turns = self._model.trust_remote_code, self.embedding_turns
        if manifest is None:
            return Embedder(given or DEFAULT_EMBEDDER, trust_remote_code=trusted, turns=turns)
        check_embedder(self._corpus_settings.embedder, manifest, self.root)
        return embedder_of(manifest, self.root, given, trusted, turns)

    @opened
    def reranker(self) -> Reranker | None:
        name = self.settings.reranker
        return None if name is None else Reranker(name, self._model.trust_remote_code)

    def vectors_of(
        self, corpus: Corpus, titled: Sequence[tuple[str, Chunk]], check: Check = proceed
    ) -> list[np.ndarray]:
        """A vector of each chunk under its title; those that ``corpus`` has are not embedded again.

        ``check`` is called between batches and may raise to give up.
        """
        texts = {(title, chunk.chunk_id): chunk.text for title, chunk in titled}
        ids: dict[str, list[str]] = {}
        for title, chunk_id in texts:
            ids.setdefault(title, []).append(chunk_id)
        known = {
            (title, chunk_id): vector
            for title in ids
            for chunk_id, vector in corpus.known_vectors(title, ids[title]).items()
        }
        new = [place for place in texts if place not in known]
        if new:  # otherwise the embedder is not even loaded
            titles = [title for title, _ in new]
            vectors = self.embedder.embed([texts[p] for p in new], titles, check=check)
            known |= zip(new, vectors, strict=True)
        return [known[title, chunk.chunk_id] for title, chunk in titled]

    def retriever(self) -> Retriever:
        return Retriever(self.require(), self.embedder, self.settings.search, self.reranker)

    def close(self) -> None:
        """Close what was opened. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if "store" in self.__dict__:
            self.store.close()
        if self._corpus is not None:
            self._corpus.close()
