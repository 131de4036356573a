"""What an engine holds open: model, store, corpus, embedder; each opened on first use.

Owns opening and the question "which model is this corpus of?". Many wrappers share one engine, so
nothing is opened twice, nothing before it is needed, and nothing once the engine is closed.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from blendrag.config import Settings
from blendrag.corpus.corpus import DIRECTORY, Corpus
from blendrag.corpus.database import FILE_NAME, EmptyDatabase
from blendrag.corpus.embedder import Embedder, embedder_of
from blendrag.corpus.manifest import Manifest
from blendrag.corpus.retriever import Retriever
from blendrag.engine.model_parts import ModelParts
from blendrag.engine.opened import opened
from blendrag.engine.trust import Trust
from blendrag.engine.wanted import Wanted
from blendrag.errors import CorpusError, InvalidInputError
from blendrag.planning.profile import Profile
from blendrag.planning.profile_record import Remembered, conditions_of
from blendrag.store import KVStore, open_store
from blendrag.store.kv import KVLayout
from blendrag.text.chunking import Chunker

logger = logging.getLogger(__name__)


class Resources(ModelParts):
    """Lazily opened parts of one engine. Opening is thread-safe, using them is the engine's care."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        root: Path,
        settings: Settings,
        wanted: Wanted,
        lora: str | None = None,
        read_only: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(model, tokenizer, settings, lora, trust_remote_code)
        self.root = root
        self._wanted = wanted
        self.read_only = read_only

    # -- store and corpus -----------------------------------------------------------------------

    @opened
    def store(self) -> KVStore:
        self._refuse_closed()
        s = self.settings
        return open_store(self.root, s.ram_bytes, s.disk_bytes, read_only=self.read_only)

    @property
    def is_writable(self) -> bool:
        """Whether more may be stored: neither asked not to, nor found to lie on a read-only mount."""
        corpus = self.corpus
        return not (self.store.read_only or (corpus is not None and corpus.read_only))

    @opened
    def _corpus(self) -> Corpus | None:
        try:
            corpus = Corpus.open(self.root, read_only=self.read_only)
        except EmptyDatabase:  # another process is just making it, or somebody emptied it
            return None
        except CorpusError:
            if os.path.lexists(self.root / DIRECTORY / FILE_NAME):
                raise
            return None
        if len(corpus) and not corpus.has_manifest:
            corpus.close()
            raise CorpusError(
                f"the corpus at {corpus.directory} lost its manifest, expected what it was ingested with; "
                "delete that directory and ingest again, which finds the stored KV"
            )
        return corpus

    def _lost_corpus(self) -> str:
        """Words on KV without a corpus; empty where there is no KV either."""
        if not os.path.lexists(self.root / "format"):
            return ""
        entries = self.store.stats().entries
        return (
            f"store {self.root} holds the KV of {entries} chunks but no corpus" if entries else ""
        )

    @property
    def corpus(self) -> Corpus | None:
        """The corpus beside the store, ``None`` before the first ingest.

        Raises :class:`InvalidInputError` once the engine is closed.
        """
        self._refuse_closed()
        found: Corpus | None = self.__dict__.get("_corpus")
        if found is None:
            with self._opening("_corpus"):
                found = self._corpus
                if found is None:
                    del self.__dict__["_corpus"]  # an ingest by another process may make one
        return found

    def own_corpus(self) -> tuple[Corpus | None, str]:
        """The corpus if it was ingested with this model's tokenizer; else ``None`` and why not."""
        corpus = self.corpus
        if (
            corpus is None
            and os.path.lexists(self.root / DIRECTORY)
            and (lost := self._lost_corpus())
        ):
            return None, f"{lost}, so nothing of it is reused; ingest the documents again"
        if corpus is None or not corpus.has_manifest:
            return None, ""
        manifest = corpus.manifest
        if manifest.tokenizer_fingerprint == self.tokens.fingerprint:
            return corpus, ""
        return None, (
            f"store {self.root} was ingested with model {manifest.model!r}, so nothing of it is "
            f"reused with {self.model_name!r}"
        )

    def require_corpus(self) -> Corpus:
        """The corpus of *this* model, or :class:`CorpusError` / :class:`InvalidInputError`."""
        corpus = self.corpus
        if corpus is None and (lost := self._lost_corpus()):
            raise CorpusError(f"{lost}; ingest the documents again, which finds the KV")
        corpus = corpus or Corpus.open(self.root)
        self._check_owner(corpus)
        return corpus

    def create_corpus(self) -> Corpus:
        """The corpus to ingest into, made with this engine's settings if there is none."""
        self._refuse_closed()
        _ = self.store  # makes the root, with its checks
        with self._opening("_corpus"):
            if self.corpus is None:
                if lost := self._lost_corpus():
                    logger.warning(
                        "%s: a new one is begun; if there was one, ingest all of its documents again",
                        lost,
                    )
                self.__dict__["_corpus"] = Corpus.open(self.root, create=True)
        corpus = self.corpus
        assert corpus is not None
        new = self._settled() or self._wanted.manifest(self.model_name, self.tokens, self.settings)
        corpus.begin(new)
        self._check_owner(corpus)
        self._wanted.check(corpus.manifest, self.root)
        return corpus

    def _settled(self) -> Manifest | None:
        """The manifest of a corpus that holds something; an empty one binds nobody."""
        corpus = self.corpus
        return (
            corpus.manifest if corpus is not None and corpus.has_manifest and len(corpus) else None
        )

    def _check_owner(self, corpus: Corpus) -> None:
        manifest = corpus.manifest
        if manifest.tokenizer_fingerprint != self.tokens.fingerprint:
            raise InvalidInputError(
                f"store {self.root} was ingested with model {manifest.model!r}, not "
                f"{self.model_name!r}; ask with --model {manifest.model}, or ingest into another --store"
            )

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What this corpus's chunks are encoded behind."""
        manifest = self._settled()
        return manifest.prefix_ids if manifest is not None else self._wanted.prefix_ids(self.tokens)

    @property
    def encoding(self) -> str:
        """How this corpus's KV is stored."""
        manifest = self._settled()
        return manifest.encoding if manifest is not None else self.settings.kv_encoding

    @property
    def layout(self) -> KVLayout:
        """The model's, as this store keeps it. Loads the model."""
        return self.adapter.layout.encoded(self.encoding)

    @property
    def chunk_tokens(self) -> int:
        """Limit of this corpus's chunks."""
        manifest = self._settled()
        if manifest is not None:
            return manifest.chunk_tokens
        return self._wanted.chunk_tokens or self.settings.chunk_tokens

    def chunker(self) -> Chunker:
        return Chunker(self.tokens.text, self.chunk_tokens)

    # -- retrieval ------------------------------------------------------------------------------

    @opened
    def embedder(self) -> Embedder:
        manifest, given = self._settled(), self.settings.embedder
        if manifest is None:
            return Embedder(given, trust_remote_code=self.trust_remote_code)
        self._wanted.check_embedder(manifest, self.root)
        named = given if "embedder" in self.settings.model_fields_set else None
        return embedder_of(manifest, self.root, named, self.trust_remote_code)

    def retriever(self) -> Retriever:
        return Retriever(self.require_corpus(), self.embedder)

    # -- whose KV -------------------------------------------------------------------------------

    @opened
    def trust(self) -> Trust:
        """Judge of whether stored KV may be used, and the only way to compute KV for storing."""
        return Trust(
            self.adapter, self.store, self.root, lambda: self.prefix_ids, lambda: self.encoding
        )

    @opened
    def _remembered(self) -> Remembered:
        return Remembered(self.root, lambda namespace: conditions_of(self.adapter, namespace))

    def profile_of(self, namespace: str) -> tuple[Profile | None, str]:
        """What was measured of this model on this machine; else ``None``, and how what there is differs."""
        return self._remembered(namespace)

    def namespace(self) -> str:
        """Namespace of the model; without loading it if the corpus was made from the same files.

        That shortcut only ever saves ingest some work: queries use the loaded tensors' own, and KV is
        computed under a namespace only if it is the loaded model's (:meth:`Trust.encode`).
        """
        corpus = self.corpus
        if not self.is_loaded and corpus is not None and corpus.has_manifest:
            manifest, signature = corpus.manifest, self.signature()
            same = manifest.model_signature == signature and manifest.encoding == self.encoding
            if signature and manifest.namespace and same:
                return manifest.namespace
        return self.trust.namespace

    def remember_namespace(self) -> None:
        """Write into the manifest whose KV the corpus has now."""
        if self.is_loaded:
            self._note(self.trust.namespace, self.signature())

    def forget_signature(self) -> None:
        """Make the next ingest load the model and look for itself."""
        corpus = self.corpus
        if corpus is not None and corpus.has_manifest:
            self._note(corpus.manifest.namespace, "")

    def _note(self, namespace: str, signature: str) -> None:
        corpus = self.corpus
        if corpus is None or not self.is_writable:
            return
        manifest = corpus.manifest
        renewed = replace(
            manifest, model=self.model_name, model_signature=signature, namespace=namespace
        )
        if renewed != manifest:
            corpus.set_manifest(renewed)

    def close(self) -> None:
        """Close what was opened. Idempotent."""
        if self._closed:
            return
        super().close()
        self.__dict__.pop("trust", None)  # holds the model
        if "store" in self.__dict__:
            self.store.close()
        corpus = self.__dict__.get("_corpus")
        if corpus is not None:
            corpus.close()
