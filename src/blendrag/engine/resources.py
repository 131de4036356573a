"""What an engine holds open: model, store, corpus, embedder; each is opened once, on first use."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers

from blendrag.config import DEFAULT_EMBEDDER, Settings, absolute_model
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.database import DIRECTORY, FILE_NAME, EmptyDatabase
from blendrag.corpus.embedder import GIVEN, Embedder, absolute_embedder, embedder_of, same_embedder
from blendrag.corpus.embedding_turns import Check, EmbeddingTurns, proceed
from blendrag.corpus.manifest import Manifest
from blendrag.corpus.retriever import Retriever
from blendrag.engine.decode_weights import DecodeWeightsChoice
from blendrag.engine.kv_validity import KVValidity
from blendrag.engine.rendering import daily_part, prefix_token_ids
from blendrag.errors import CorpusError, InvalidInputError
from blendrag.fusor import Fusor
from blendrag.model.adapter import ModelAdapter
from blendrag.model.loading import (
    hub_kwargs,
    load_adapter,
    load_context_tokens,
    load_tokens,
    model_signature,
    precision_signature,
    resolve_device,
)
from blendrag.model.sharing import loaded_once
from blendrag.model.tokens import Tokens
from blendrag.planning.profile import ProfileCache, conditions_of
from blendrag.serving.scheduler import CLOSED
from blendrag.store.identity import is_name
from blendrag.store.kv import KVLayout
from blendrag.store.remote.tier import RemoteTier
from blendrag.store.tiered import KVStore, open_store
from blendrag.text.chunking import Chunk, Chunker

logger = logging.getLogger(__name__)

T = TypeVar("T")


class opened(cached_property[T]):
    """A part that the first thread to ask opens while others who ask wait.

    ``functools.cached_property`` alone lets two threads open it twice since Python 3.12. Each part has its
    own lock: loading a model does not block the tokenizer or the corpus.
    """

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        with instance._opening(self.attrname):
            return super().__get__(instance, owner)


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
        self.check_embedder(manifest, root)
        wrong = {}
        if self.chunk_tokens not in (None, manifest.chunk_tokens):
            tokens = manifest.chunk_tokens
            wrong["chunk_tokens"] = f"holds chunks of {tokens} tokens, not {self.chunk_tokens}"
        if self.prefix_text not in (None, manifest.prefix_text):
            wrong["prefix"] = "was ingested with another prefix"
        if self.kv_encoding not in (None, manifest.encoding):
            wrong["kv_encoding"] = (
                f"keeps KV in encoding {manifest.encoding}, not {self.kv_encoding}"
            )
        if manifest.prefix_ids and not self.encode_prefix:
            tokens = len(manifest.prefix_ids)
            wrong["encode_prefix=False"] = f"was ingested with a prefix of {tokens} tokens"
        for option, why in wrong.items():
            raise InvalidInputError(
                f"store {root} {why}; leave {option} out or ingest into another store"
            )

    def check_embedder(self, manifest: Manifest, root: Path) -> None:
        """Raise :class:`InvalidInputError` if the vectors are from another embedder."""
        if self.embedder is None or manifest.embedder.startswith(GIVEN):
            return  # compared when vectors are given
        if not same_embedder(self.embedder, manifest.embedder):
            raise InvalidInputError(
                f"store {root} was embedded with {manifest.embedder!r}, not "
                f"{self.embedder!r}; leave the embedder out or ingest into another store"
            )


def _remote_tier(given: Settings) -> RemoteTier:
    assert given.remote is not None
    secret = given.remote_key
    return RemoteTier(given.remote, secret, given.remote_timeout_s)


#: Ends the name of the record of a namespace's prompt schemas.
SCHEMA_RECORDS = ".schemas"


def schema_namespaces(root: Path) -> list[str]:
    """The namespaces of the store at ``root`` that hold modules of prompt schemas."""
    ending = f"{SCHEMA_RECORDS}.json"
    names = [path.name.removesuffix(ending) for path in (root / "verified").glob(f"*{ending}")]
    return [name for name in names if is_name(name)]


class Resources:
    """The parts of one engine. Opening them is thread-safe; the engine orders their use."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        root: Path,
        settings: Settings,
        corpus_settings: CorpusSettings,
        lora: str | None = None,
        read_only: bool = False,
        trust_remote_code: bool = False,
        model_kwargs: Mapping[str, Any] | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        """``model``: a name, a loaded model (then with its ``tokenizer``) or a :class:`ModelAdapter`.

        ``manifest``: of the corpus that another process keeps for this one.
        """
        if model_kwargs and not isinstance(model, str | Path):
            raise InvalidInputError(
                f"model_kwargs {', '.join(model_kwargs)} with a loaded {type(model).__name__}, expected the "
                "name of a model; give them to from_pretrained instead"
            )
        self._model_kwargs = dict(model_kwargs or {})
        self._given_model = absolute_model(model) if isinstance(model, str | Path) else model
        self._given_tokenizer = tokenizer
        self.root = root
        self.settings = settings
        self._corpus_settings = corpus_settings
        self._given_manifest = manifest
        self._lora = lora
        self.read_only = read_only
        self.trust_remote_code = trust_remote_code
        self.embedding_turns = EmbeddingTurns()
        self._locks: dict[str, threading.RLock] = {}
        self._closed = False

    def reopen_in(self) -> Callable[[Path], Resources]:
        """Makes these resources in another process, over the store that it is given; can be pickled.

        That process uses no corpus. Raises :class:`InvalidInputError` for a model that was given loaded.
        """
        if not isinstance(self._given_model, str):
            raise InvalidInputError(
                f"a loaded {type(self._given_model).__name__} cannot be sent to other machines, expected the "
                "name of a model; give its hub id or directory"
            )
        return partial(
            Resources,
            self._given_model,
            None,
            settings=self.settings,
            corpus_settings=self._corpus_settings,
            lora=self._lora and absolute_model(self._lora),
            trust_remote_code=self.trust_remote_code,
            model_kwargs=self._model_kwargs,
            manifest=self.manifest,
        )

    def _opening(self, part: str) -> threading.RLock:
        return self._locks.setdefault(part, threading.RLock())

    def _refuse_closed(self) -> None:
        if self._closed:
            raise InvalidInputError(CLOSED)

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
            self._refuse_closed()
            load = partial(
                load_adapter,
                given,
                settings.dtype,
                settings.device,
                self._lora,
                self.trust_remote_code,
                self._model_kwargs,
            )
            return loaded_once(self._loaded_as(given), load)
        if self._given_tokenizer is None:
            raise InvalidInputError(
                f"a loaded {type(given).__name__} needs its tokenizer too; give both: model=…, tokenizer=…"
            )
        return ModelAdapter(given, self._given_tokenizer)

    def _loaded_as(self, name: str) -> Hashable:
        """Key under which engines share one loaded model."""
        s, lora = self.settings, self._lora
        files = model_signature(name), model_signature(absolute_model(lora)) if lora else ""
        where, more = str(resolve_device(s.device)), repr(sorted(self._model_kwargs.items()))
        loaded = files, s.dtype, where, more, self.trust_remote_code
        return name, lora and absolute_model(lora), loaded

    @opened
    def tokens(self) -> Tokens:
        """The model's tokenizers; does not load the weights."""
        if not self.is_loaded:
            files = hub_kwargs(self._model_kwargs)
            return load_tokens(self._given_model, self.trust_remote_code, **files)
        return self.adapter.tokens

    @property
    def context_tokens(self) -> int:
        """The model's context window; does not load the weights."""
        if self.is_loaded:
            return self.adapter.context_tokens
        files = hub_kwargs(self._model_kwargs)
        return load_context_tokens(self._given_model, self.trust_remote_code, **files)

    @opened
    def fusor(self) -> Fusor:
        return Fusor(self.adapter)

    @opened
    def decode_weights(self) -> DecodeWeightsChoice:
        return DecodeWeightsChoice(self.adapter, self.settings.decode_weights)

    @opened
    def text_ids(self) -> Callable[[str], tuple[int, ...]]:
        """Token ids of chunk text; the most recently used are cached."""
        encode = self.tokens.encode_text
        return lru_cache(maxsize=4096)(lambda text: tuple(encode(text)))

    def signature(self) -> str:
        """Signature of the checkpoint's files and of how they are loaded; empty if unknown."""
        given, s = self._given_model, self.settings
        is_plain = isinstance(given, str) and not self._lora and not self._model_kwargs
        files = model_signature(given) if is_plain else ""
        if not files:
            return ""
        dtype = s.dtype
        if not s.device.startswith("cuda"):  # asking for CUDA here would initialise it
            dtype = precision_signature(dtype, resolve_device(s.device))
        return f"{files}|{dtype}|{s.device}|{torch.__version__}|{transformers.__version__}"

    # -- store and corpus -----------------------------------------------------------------------

    @opened
    def store(self) -> KVStore:
        self._refuse_closed()
        s = self.settings
        remote = partial(_remote_tier, s) if s.remote else None
        return open_store(
            self.root, s.ram_bytes, s.disk_bytes, read_only=self.read_only, remote=remote
        )

    @property
    def is_writable(self) -> bool:
        """Whether the store and the corpus can be written."""
        corpus = self.corpus
        return not (self.store.read_only or (corpus is not None and corpus.read_only))

    @opened
    def _corpus(self) -> Corpus | None:
        try:
            corpus = Corpus.open(self.root, read_only=self.read_only)
        except EmptyDatabase:  # another process is creating it
            return None
        except CorpusError:
            if os.path.lexists(self.root / DIRECTORY / FILE_NAME):
                raise
            return None
        if len(corpus) and not corpus.has_manifest:
            corpus.close()
            raise CorpusError(
                f"the corpus at {corpus.directory} has lost its manifest; "
                "delete that directory and ingest again, which finds the stored KV"
            )
        return corpus

    def _lost_corpus(self) -> str:
        """A clause for errors if the store has KV but no corpus, else empty."""
        made = os.path.lexists(self.root / "format")
        entries = 0
        if made and self.corpus is None and (entries := self.store.stats().entries):
            entries -= sum(
                1 for each in schema_namespaces(self.root) for _ in self.store.keys(each)
            )
        lost = f"store {self.root} holds the KV of {entries} chunks but no corpus"
        return lost if entries else ""

    @property
    def corpus(self) -> Corpus | None:
        """The corpus in the store's directory, ``None`` before the first ingest.

        Raises :class:`InvalidInputError` once the engine is closed.
        """
        self._refuse_closed()
        found: Corpus | None = self.__dict__.get("_corpus")
        if found is None:
            with self._opening("_corpus"):
                found = self._corpus
                if found is None:
                    del self.__dict__["_corpus"]  # another process may create one
        return found

    def corpus_or_reason(self) -> tuple[Corpus | None, str]:
        """The corpus if it was ingested with this model's tokenizer; else ``None`` and the reason."""
        corpus = self.corpus
        if os.path.lexists(self.root / DIRECTORY) and (lost := self._lost_corpus()):
            return None, f"{lost}, so nothing of it is reused; ingest the documents again"
        if corpus is None or not corpus.has_manifest:
            return None, ""
        manifest = corpus.manifest
        if manifest.tokenizer_fingerprint == self.tokens.fingerprint:
            return corpus, ""
        if not corpus.has_documents:
            return None, ""
        return None, (
            f"store {self.root} was ingested with {self._model_of(manifest)}, so nothing of it is reused "
            f"with {self.model_name!r}"
        )

    def _model_of(self, manifest: Manifest) -> str:
        """The model of ``manifest``, whose tokenizer is not this one's."""
        of = "" if manifest.model != self.model_name else " and another tokenizer than it has now"
        return f"model {manifest.model!r}{of}"

    def require_corpus(self) -> Corpus:
        """The corpus of this model. Raises :class:`CorpusError` or :class:`InvalidInputError`."""
        if lost := self._lost_corpus():
            raise CorpusError(f"{lost}; ingest the documents again, which finds the KV")
        corpus = self.corpus or Corpus.open(self.root)
        self._check_owner(corpus)
        return corpus

    def create_corpus(self) -> Corpus:
        """The corpus to ingest into, created with this engine's settings if there is none."""
        self._refuse_closed()
        _ = self.store  # makes the root, with its checks
        with self._opening("_corpus"):
            if self.corpus is None:
                if lost := self._lost_corpus():
                    logger.warning(
                        "%s: creating a new one; ingest all documents again if there was one", lost
                    )
                self.__dict__["_corpus"] = Corpus.open(self.root, create=True)
        corpus = self.corpus
        assert corpus is not None
        corpus.begin(self.manifest)
        self.check_corpus(corpus)
        return corpus

    def check_corpus(self, corpus: Corpus) -> None:
        """Raise :class:`InvalidInputError` if ``corpus`` has another model or other settings."""
        self._check_owner(corpus)
        self._corpus_settings.check(corpus.manifest, self.root)

    def _settled(self) -> Manifest | None:
        """The manifest of a corpus with documents; the settings of any other may still change."""
        corpus = self.corpus
        is_settled = corpus is not None and corpus.has_manifest and corpus.has_documents
        return corpus.manifest if corpus is not None and is_settled else None

    @property
    def manifest(self) -> Manifest:
        """The corpus's manifest; one with this engine's settings while the corpus has no documents."""
        return self._given_manifest or self._settled() or self._new_manifest

    @opened
    def _new_manifest(self) -> Manifest:
        return self._corpus_settings.manifest(self.model_name, self.tokens, self.settings)

    def _check_owner(self, corpus: Corpus) -> None:
        manifest = corpus.manifest
        if manifest.tokenizer_fingerprint != self.tokens.fingerprint:
            raise InvalidInputError(
                f"store {self.root} was ingested with {self._model_of(manifest)}, not {self.model_name!r}; "
                "use that model, or ingest into another store"
            )

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids of the prefix that the corpus's chunks are encoded after."""
        return self.manifest.prefix_ids

    @opened
    def _undated_tokens(self) -> int:
        """How many tokens of the prefix precede what the chat template changes from day to day."""
        prefix = self.prefix_ids
        is_head = bool(prefix) and prefix == prefix_token_ids(self.tokens)
        return daily_part(self.tokens) if is_head else len(prefix)

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

    @property
    def layout(self) -> KVLayout:
        """KV layout of the model in this store's encoding. Loads the model."""
        return self.adapter.layout.encoded(self.manifest.encoding)

    def chunker(self) -> Chunker:
        return Chunker(self.tokens.text, self.manifest.chunk_tokens)

    # -- retrieval ------------------------------------------------------------------------------

    @opened
    def embedder(self) -> Embedder:
        manifest, given = self._settled(), self.settings.embedder
        trusted, turns = self.trust_remote_code, self.embedding_turns
        if manifest is None:
            return Embedder(given or DEFAULT_EMBEDDER, trust_remote_code=trusted, turns=turns)
        self._corpus_settings.check_embedder(manifest, self.root)
        return embedder_of(manifest, self.root, given, trusted, turns)

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
        return Retriever(self.require_corpus(), self.embedder)

    # -- whose KV -------------------------------------------------------------------------------

    @opened
    def kv_validity(self) -> KVValidity:
        """Decides whether stored KV may be used; the only way to compute KV for storing."""
        return KVValidity(self.adapter, self.store, self.root, lambda: self.manifest)

    @opened
    def profile_of(self) -> ProfileCache:
        """The machine profile of a namespace, or ``None`` and how the stored profile differs."""
        return ProfileCache(self.root, lambda namespace: conditions_of(self.adapter, namespace))

    def namespace(self) -> str:
        """Namespace of the model, from the manifest if the corpus was made from the same files.

        This saves ingest from loading the model. Queries use the loaded model's own namespace.
        """
        corpus, manifest = self.corpus, self._given_manifest
        if manifest is None and corpus is not None and corpus.has_manifest:
            manifest = corpus.manifest
        if not self.is_loaded and manifest is not None:
            signature = self.signature()
            same = manifest.model_signature == signature
            same &= manifest.encoding == self.manifest.encoding
            if signature and manifest.namespace and same:
                return manifest.namespace
        return self.kv_validity.namespace

    def remember_namespace(self) -> None:
        """Record the loaded model's namespace in the manifest."""
        if self.is_loaded:
            self.note_namespace(self.kv_validity.namespace, self.signature())

    def forget_signature(self) -> None:
        """Make the next ingest load the model instead of relying on its files' signature."""
        corpus = self.corpus
        if corpus is not None and corpus.has_manifest:
            self.note_namespace(corpus.manifest.namespace, "")

    def note_namespace(self, namespace: str, signature: str) -> None:
        """Record in the manifest which namespace the files of that signature have."""
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
        self._closed = True
        if isinstance(self._given_model, str):  # the last engine that uses a shared model frees it
            for part in ("adapter", "fusor"):
                self.__dict__.pop(part, None)
        for part in ("kv_validity", "decode_weights"):  # they hold the model
            self.__dict__.pop(part, None)
        if "store" in self.__dict__:
            self.store.close()
        corpus = self.__dict__.get("_corpus")
        if corpus is not None:
            corpus.close()
