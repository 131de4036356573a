"""What an engine holds open: model, store, corpus, embedder; each loaded on first use.

Owns loading and the question "which model is this corpus of?". Many
wrappers share one engine, so nothing is loaded twice and nothing before it is needed.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from blendrag.chunking import Chunker
from blendrag.config import Settings, absolute_model
from blendrag.engine.trust import Trust
from blendrag.errors import CorpusError, InvalidInputError
from blendrag.estimates import Profile
from blendrag.fusor import Fusor
from blendrag.kv import KVLayout
from blendrag.model.adapter import ModelAdapter
from blendrag.model.loading import load_adapter, load_tokens, model_signature
from blendrag.model.tokens import Tokens
from blendrag.profile import conditions_of
from blendrag.profile.record import Remembered
from blendrag.retriever.corpus import DIRECTORY, Corpus
from blendrag.retriever.database import FILE_NAME
from blendrag.retriever.embedder import GIVEN, Embedder, same_embedder
from blendrag.retriever.manifest import Manifest
from blendrag.retriever.retriever import Retriever
from blendrag.store import KVStore, open_store

T = TypeVar("T")


class opened(cached_property[T]):
    """A part opened by the first thread that asks for it, while others who ask wait.

    ``functools.cached_property`` alone lets two threads open it twice since Python 3.12. Each part
    has a lock of its own: a loading model keeps nobody from the tokenizer or the corpus.
    """

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        with instance._opening(self.attrname):
            return super().__get__(instance, owner)


class Resources:
    """Lazily opened parts of one engine. Opening is thread-safe, using them is the engine's care."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        root: Path,
        settings: Settings,
        prefix_text: str | None,
        chunk_tokens: int | None,
        embedder: str | None,
        lora: str | None,
        read_only: bool,
        encode_prefix: bool = True,
        encoding: str | None = None,
    ) -> None:
        """``encoding``: asked for, and not merely a default."""
        if prefix_text and not encode_prefix:
            raise InvalidInputError(
                f"prefix_text {prefix_text[:40]!r} with encode_prefix=False, expected one of them: "
                "leave prefix_text out to encode chunks behind nothing"
            )
        self._given_model = absolute_model(model) if isinstance(model, str | Path) else model
        self._given_tokenizer = tokenizer
        self.root = root
        self.settings = settings
        self._prefix_text = prefix_text
        self._encode_prefix = encode_prefix
        self._encoding = encoding
        self._chunk_tokens = chunk_tokens
        self._embedder = embedder
        self._lora = lora
        self.read_only = read_only
        self._locks: dict[str, threading.RLock] = {}
        self._closed = False

    def _opening(self, part: str) -> threading.RLock:
        return self._locks.setdefault(part, threading.RLock())

    # -- model ----------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        given = self._given_model
        if isinstance(given, str):
            return given
        return given.model_id if isinstance(given, ModelAdapter) else self.adapter.model_id

    @property
    def is_loaded(self) -> bool:
        """Whether the model's weights are in memory."""
        return "adapter" in self.__dict__ or not isinstance(self._given_model, str)

    @opened
    def adapter(self) -> ModelAdapter:
        given, settings = self._given_model, self.settings
        if isinstance(given, ModelAdapter):
            return given
        if isinstance(given, str):
            return load_adapter(given, settings.dtype, settings.device, self._lora)
        if self._given_tokenizer is None:
            raise InvalidInputError(
                f"a loaded {type(given).__name__} needs its tokenizer too: "
                "BlendEngine(model, tokenizer=…)"
            )
        return ModelAdapter(given, self._given_tokenizer)

    @opened
    def tokens(self) -> Tokens:
        """The model's tokenizers, without its weights where those are not loaded yet."""
        if not self.is_loaded:
            return load_tokens(self._given_model)
        return self.adapter.tokens

    @opened
    def fusor(self) -> Fusor:
        return Fusor(self.adapter)

    # -- store and corpus -----------------------------------------------------------------------

    @opened
    def store(self) -> KVStore:
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
            return Corpus.open(self.root, read_only=self.read_only)
        except CorpusError:
            if (self.root / DIRECTORY / FILE_NAME).exists():
                raise
            return None

    @property
    def corpus(self) -> Corpus | None:
        """The corpus beside the store, ``None`` before the first ingest."""
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
        corpus = self.corpus or Corpus.open(self.root)
        self._check_owner(corpus)
        return corpus

    def create_corpus(self) -> Corpus:
        """The corpus to ingest into, made with this engine's settings if there is none."""
        _ = self.store  # makes the root, with its checks
        with self._opening("_corpus"):
            if self.corpus is None:
                self.__dict__["_corpus"] = Corpus.open(self.root, create=True)
        corpus = self.corpus
        assert corpus is not None
        corpus.begin(self._settled() or self._new_manifest())
        self._check_owner(corpus)
        self._check_settings(corpus.manifest)
        return corpus

    def _settled(self) -> Manifest | None:
        """The manifest of a corpus that holds something; an empty one binds nobody."""
        corpus = self.corpus
        return (
            corpus.manifest if corpus is not None and corpus.has_manifest and len(corpus) else None
        )

    def _new_manifest(self) -> Manifest:
        return Manifest(
            model=self.model_name,
            model_signature="",
            tokenizer_fingerprint=self.tokens.fingerprint,
            namespace="",
            chunk_tokens=self._chunk_tokens or self.settings.chunk_tokens,
            prefix_ids=self._own_prefix_ids(),
            prefix_text=self._prefix_text or "",
            embedder=self.settings.embedder,
            encoding=self.settings.kv_encoding,
        )

    def _check_owner(self, corpus: Corpus) -> None:
        manifest = corpus.manifest
        if manifest.tokenizer_fingerprint != self.tokens.fingerprint:
            raise InvalidInputError(
                f"store {self.root} was ingested with model {manifest.model!r}, not "
                f"{self.model_name!r}; ask with --model {manifest.model}, or ingest into another --store"
            )

    def _check_settings(self, manifest: Manifest) -> None:
        wanted = self._chunk_tokens
        if wanted is not None and wanted != manifest.chunk_tokens:
            raise InvalidInputError(
                f"store {self.root} holds chunks of {manifest.chunk_tokens} tokens, not {wanted}; "
                "leave --chunk-tokens out or ingest into another --store"
            )
        given = manifest.embedder.startswith(GIVEN)  # compared with the vectors that are given
        if (
            self._embedder is not None
            and not given
            and not same_embedder(self._embedder, manifest.embedder)
        ):
            raise InvalidInputError(
                f"store {self.root} was embedded with {manifest.embedder!r}, not "
                f"{self._embedder!r}; leave --embedder out or ingest into another --store"
            )
        if self._prefix_text is not None and self._prefix_text != manifest.prefix_text:
            raise InvalidInputError(
                f"store {self.root} was ingested behind another prefix; "
                "leave --prefix-file out or ingest into another --store"
            )
        if self._encoding is not None and self._encoding != manifest.encoding:
            raise InvalidInputError(
                f"store {self.root} keeps KV in encoding {manifest.encoding}, not {self._encoding}; "
                "leave --encoding out or ingest into another --store"
            )
        if not self._encode_prefix and manifest.prefix_ids:
            raise InvalidInputError(
                f"store {self.root} was ingested behind a prefix of {len(manifest.prefix_ids)} tokens; "
                "leave encode_prefix=False out or ingest into another --store"
            )

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What this corpus's chunks are encoded behind."""
        manifest = self._settled()
        return manifest.prefix_ids if manifest is not None else self._own_prefix_ids()

    def _own_prefix_ids(self) -> tuple[int, ...]:
        if not self._encode_prefix:
            return ()
        if self._prefix_text:
            return tuple(self.tokens.encode_template(self._prefix_text))
        return self.tokens.default_prefix_ids()

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
        return self._chunk_tokens or self.settings.chunk_tokens

    def chunker(self) -> Chunker:
        return Chunker(self.tokens.text, self.chunk_tokens)

    # -- retrieval ------------------------------------------------------------------------------

    @opened
    def embedder(self) -> Embedder:
        manifest = self._settled()
        return Embedder(manifest.embedder if manifest is not None else self.settings.embedder)

    def retriever(self) -> Retriever:
        return Retriever(self.require_corpus(), self.embedder)

    # -- chunks by content ----------------------------------------------------------------------

    @opened
    def _ids_of_text(self) -> Any:
        @lru_cache(maxsize=4096)
        def ids_of(text: str) -> tuple[int, ...]:
            return tuple(self.tokens.encode_text(text))

        return ids_of

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Ids of chunk text, remembered for the chunks used most recently."""
        ids: tuple[int, ...] = self._ids_of_text(text)
        return ids

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

    def signature(self) -> str:
        """Signature of the checkpoint's files and of how they are loaded; empty if unknown."""
        given, s = self._given_model, self.settings
        files = model_signature(given) if isinstance(given, str) and not self._lora else ""
        if not files:
            return ""
        return f"{files}|{s.dtype}|{s.device}|{torch.__version__}|{transformers.__version__}"

    def close(self) -> None:
        """Close what was opened. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if "store" in self.__dict__:
            self.store.close()
        corpus = self.__dict__.get("_corpus")
        if corpus is not None:
            corpus.close()
