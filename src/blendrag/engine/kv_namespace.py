"""Where the KV of one model is kept in one store, and whether it may be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from blendrag.config import Settings, absolute_model
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.manifest import Manifest
from blendrag.engine.kv_validity import KVValidity
from blendrag.engine.lazy_model import LazyModel, opened
from blendrag.engine.loaded_as import RECORDS, recorded
from blendrag.engine.model_corpus import CorpusSettings, ModelCorpus
from blendrag.engine.store_writer import StoreWriter
from blendrag.errors import InvalidInputError, ModelLoadError, StoreFullError
from blendrag.model.loading import checked_model_kwargs
from blendrag.model.writer import Writer
from blendrag.planning.profile import ProfileCache, conditions_of
from blendrag.store.identity import ChunkRecipe, chunk_key, chunk_keys, kv_namespace
from blendrag.store.kv import KVLayout
from blendrag.store.records import recorded_namespaces
from blendrag.store.root import check_place, is_there
from blendrag.store.tiered import KVStore
from blendrag.text.chunking import scope_of

T = TypeVar("T")

#: KV learned from prompts that is given up at a time if there is no room to write the corpus.
GIVEN_UP_BYTES = 64 << 20


class KVNamespace:
    """The KV of one :attr:`model` that belongs to one :attr:`corpus`."""

    def __init__(self, model: LazyModel, corpus: ModelCorpus, options: Mapping[str, Any]) -> None:
        """``options``: of :func:`opened_namespace`."""
        self.model = model
        self.corpus = corpus
        self.root = corpus.root
        self._options = options
        #: What encodes chunks beside the model's weights, if anything does.
        self.writer = StoreWriter(options.get("writer"), corpus)
        #: Where prefills have left KV of chunks, in memory only.
        self.kept_in: set[str] = set()

    def reopen_in(self) -> Callable[..., KVNamespace]:
        """A function that makes this namespace in another process from the root of a store; can be pickled.

        Its keyword ``settings`` replaces these settings. That process uses no corpus. Raises
        :class:`InvalidInputError` for a model that was given loaded.
        """
        name = self.model.given
        if not isinstance(name, str):
            raise InvalidInputError(
                f"a loaded {type(name).__name__} cannot be sent to other machines, expected the name of a "
                "model; give its hub id or directory"
            )
        after = self.recipe.encode_after
        given = {**self._options, "writer": self.writer.sent(), "encode_after": after}
        manifest = self.corpus.manifest
        return partial(
            opened_namespace, name, settings=self.settings, options=given, manifest=manifest
        )

    @property
    def settings(self) -> Settings:
        return self.corpus.settings

    @property
    def store(self) -> KVStore:
        """The store; opens it."""
        return self.corpus.store

    @property
    def is_writable(self) -> bool:
        """Whether the store and the corpus can be written."""
        corpus = self.corpus.current
        return not (self.store.read_only or (corpus is not None and corpus.read_only))

    @property
    def is_new(self) -> bool:
        """Whether nothing was created in the store's directory yet."""
        return not is_there(self.root)

    def create_corpus(self, encodes: bool = False, embeds: bool = False) -> Corpus:
        """The corpus to add to, created if there is none. Raises as :meth:`require_writer`.

        Before a store is created, the tokenizer is opened, with ``embeds`` the embedder and with ``encodes``
        the model: what fails leaves nothing behind.
        """
        if self.is_new:
            check_place(self.root)
        self.require_writer()
        if self.is_new:
            _ = self.model.tokens
            _ = embeds and self.corpus.embedder.dim
            _ = encodes and self.model.adapter
        return self.corpus.create()

    def require_writer(self) -> None:
        """Raise :class:`ModelLoadError` for a given writer that cannot be read, and before a store is created
        also for one that does not fit the model, which is loaded then."""
        if self.writer.is_given:
            self.writer.writer()
            if self.is_new and self.model.adapter.refusal is None:
                self.writer.fit(self.model.adapter)

    def warnings(self) -> list[str]:
        """What an ingest says before it begins."""
        writer, told = self._named_writer(), self._unlike_corpus()
        if writer is not None and (why := writer.trained_otherwise(self.recipe.encode_after)):
            after = writer.encode_after
            told.append(
                f"{why}; ingest with encode_after {after} (--encode-after {after}), or compare both with "
                "blendrag eval"
            )
        return told

    def _named_writer(self) -> Writer | None:
        """The writer, if this ingest was given it or how many chunks to encode after; an earlier one has said
        what else there is to say. Raises :class:`ModelLoadError` for a given writer that cannot be read."""
        if self.writer.is_given:
            return self.writer.writer()
        if self._options.get("encode_after") is not None:
            with suppress(ModelLoadError):  # one that is lost is named when a chunk needs it
                return self.writer.writer()
        return None

    def _unlike_corpus(self) -> list[str]:
        """What the corpus has otherwise than an ingest is asked for: settings of a new corpus, and the recipe
        by which chunks are encoded."""
        manifest, now = self.corpus.settled_manifest, self.recipe
        if manifest is None:
            return []
        told = self.corpus.ignored_settings(manifest)
        then = manifest.recipe
        if then == now or not manifest.namespace:
            return told
        before, other = then.unlike(now), now.unlike(then)
        return [
            *told,
            f"store {self.root} has KV that was encoded {before}, and this ingest encodes {other}; both are "
            "kept, and questions use the new KV, which documents that are not ingested again get when they "
            f"are asked about; blendrag store clear --store {self.root} --namespace "
            f"{manifest.namespace[:12]} removes the old",
        ]

    @property
    def recipe(self) -> ChunkRecipe:
        """How chunks are encoded: as this engine was told, else as the corpus says. Raises
        :class:`ModelLoadError` for a given writer that cannot be read."""
        after = self._options.get("encode_after")
        if after is None:
            after = self.corpus.manifest.encode_after
        return ChunkRecipe(self.writer.fingerprint, after)

    @property
    def layout(self) -> KVLayout:
        """KV layout of the model in this store's encoding. Loads the model."""
        return self.model.adapter.layout.encoded(self.corpus.manifest.encoding)

    @opened
    def validity(self) -> KVValidity:
        """Decides whether stored KV may be used; the only way to compute KV for storing."""
        adapter = self.model.adapter
        if adapter.refusal is None:
            self.writer.fit(adapter)
        return KVValidity(
            adapter,
            self.store,
            self.root,
            lambda: self.corpus.manifest,
            writer=self.writer,
            recipe=lambda: self.recipe,
        )

    @opened
    def profile_of(self) -> ProfileCache:
        """The machine profile of a namespace, or ``None`` and how the stored profile differs."""
        return ProfileCache(
            self.root, lambda namespace: conditions_of(self.model.adapter, namespace)
        )

    # -- its name ---------------------------------------------------------------------------------

    def name(self) -> str:
        """The namespace, from the manifest if the corpus was made from the same files.

        This saves ingest from loading the model. Queries use the loaded model's own namespace.
        """
        manifest = self.corpus.recorded_manifest
        if not self.model.is_loaded and manifest is not None:
            signature = self.model.signature()
            same = manifest.model_signature == signature
            same &= manifest.encoding == self.corpus.manifest.encoding
            same &= manifest.recipe == self.recipe
            if signature and manifest.namespace and same:
                return manifest.namespace
        return self.validity.namespace

    def remember(self, by_ingest: bool = True) -> None:
        """Record the loaded model's namespace in the manifest. Only an ingest changes documents' recipe."""
        corpus = self.corpus.current
        has_documents = corpus is not None and corpus.has_documents
        if has_documents and not by_ingest:
            by_ingest = self.corpus.manifest.recipe == self.recipe
        if self.model.is_loaded and (by_ingest or not has_documents):
            namespace = self.validity.namespace
            self.record(namespace, self.model.signature())
            if self.is_writable and recorded(self.root, namespace) is None:
                self.validity.record(namespace)  # KV that was imported

    def forget_signature(self) -> None:
        """Make the next ingest load the model instead of relying on its files' signature."""
        if (manifest := self.corpus.recorded_manifest) is not None:
            self.record(manifest.namespace, "", manifest.recipe)

    def record(self, namespace: str, signature: str, recipe: ChunkRecipe | None = None) -> None:
        """Record the namespace of the files of that signature, and its ``recipe``; default: this engine's."""
        corpus = self.corpus.current
        if corpus is None or not self.is_writable:
            return
        manifest = corpus.manifest
        if recipe is None:
            self.writer.keep()
            recipe = self.recipe
        renewed = replace(
            manifest,
            model=self.model.name,
            model_signature=signature,
            namespace=namespace,
            writer=recipe.writer,
            encode_after=recipe.encode_after,
        )
        if renewed != manifest:
            corpus.set_manifest(renewed)
            self.writer.keep()  # gc may have removed it while no corpus named it

    def record_recipe(self) -> None:
        """Record how chunks are encoded, before the first is stored: a run that is killed goes on so."""
        corpus = self.corpus.current
        if corpus is not None and not corpus.has_documents:
            self.record(corpus.manifest.namespace, corpus.manifest.model_signature)

    # -- its entries ------------------------------------------------------------------------------

    def keys_of(self, namespace: str, text: str) -> tuple[str, ...]:
        """Keys of the KV of a chunk with this text after the corpus's prefix: by the recipe, and by the model
        alone if that is other KV."""
        ids, recipe = self.model.text_ids(text), self.recipe
        return chunk_keys(namespace, self.corpus.prefix_ids, ids, recipe.is_exact)

    def places_of(self, chunk_id: str, text: str) -> dict[str, tuple[str, ...]]:
        """Keys of the KV of the chunk by the namespaces that requests may use. May load the model."""
        after, scope = self._after(text), scope_of(chunk_id)
        found = {}
        for namespace, recipe in self._recipes().items():
            within = kv_namespace(namespace, scope, is_long=False)
            found[within] = chunk_keys(within, *after, recipe.is_exact)
        return found

    def _after(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids of the prefix and of a chunk."""
        manifest = self.corpus.recorded_manifest or self.corpus.manifest
        return manifest.prefix_ids, self.model.text_ids(text)

    def _recipes(self) -> dict[str, ChunkRecipe]:
        """By the namespaces that requests may use."""
        manifest = self.corpus.recorded_manifest or self.corpus.manifest
        recipes = {manifest.namespace: manifest.recipe} if manifest.namespace else {}
        if self.model.is_loaded or not recipes:
            recipes[self.validity.namespace] = self.recipe
        return recipes

    def drop_orphaned(self) -> int:
        """Delete the KV of chunks that were removed or whose addition was abandoned, also what other recipes
        and other weights computed of them, and prefills of this engine; returns how many."""
        corpus = self.corpus.current
        dropped = corpus.dropped.texts() if corpus is not None else {}
        if corpus is None or not dropped:
            return 0
        for within in tuple(self.kept_in):
            for text in dropped.values():
                key = chunk_key(within, self.corpus.prefix_ids, self.model.text_ids(text))
                self.store.memory.delete(within, key)
        if self.store.stats().entries:
            namespaces = self._recipes().keys() | recorded_namespaces(self.root, RECORDS)
            for chunk_id, text in dropped.items():
                if corpus.dropped.is_removed(chunk_id):
                    for namespace, is_long in product(sorted(namespaces), (False, True)):
                        within = kv_namespace(namespace, scope_of(chunk_id), is_long)
                        for key in chunk_keys(within, *self._after(text), chunks_are_exact=False):
                            self.store.delete(within, key)
        corpus.dropped.forget(list(dropped))
        return len(dropped)

    def with_room(self, write: Callable[[], T]) -> T:
        """Call ``write``, which changes the corpus; while the disk is full, delete learned KV and repeat."""
        while True:
            try:
                return write()
            except StoreFullError:
                if not self.store.give_up_learned(GIVEN_UP_BYTES):
                    raise

    def close(self) -> None:
        """Close what was opened. Idempotent."""
        self.model.close()
        self.__dict__.pop("validity", None)  # holds the model
        self.corpus.close()


def opened_namespace(
    model: Any,
    root: Path,
    settings: Settings,
    options: Mapping[str, Any],
    manifest: Manifest | None = None,
) -> KVNamespace:
    """The namespace of an engine with these ``options`` of its constructor; opens nothing yet.

    ``manifest``: of the corpus that another process keeps for this one. Raises :class:`InvalidInputError` for
    options that exclude one another, and :class:`ModelLoadError` for a writer that is not there.
    """
    model_kwargs = checked_model_kwargs(
        options.get("model_kwargs"), options.get("device_map"), settings.dtype, settings.device
    )
    tokenizer, lora = options.get("tokenizer"), options.get("lora")
    lora = lora and absolute_model(lora)
    trusts = bool(options.get("trust_remote_code"))
    named = {each.name for each in fields(CorpusSettings)} & options.keys()
    corpus_settings = CorpusSettings(**{name: options[name] for name in named})
    made = LazyModel(model, tokenizer, settings, lora, trusts, model_kwargs)
    read_only = bool(options.get("read_only"))
    corpus = ModelCorpus(made, root, settings, corpus_settings, read_only, manifest)
    recipe = {
        name: options.get(name, getattr(settings, name)) for name in ("writer", "encode_after")
    }
    return KVNamespace(made, corpus, {**options, "lora": lora, **recipe})
