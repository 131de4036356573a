"""Checks that stored KV matches the loaded model. All KV that an engine stores is encoded here.

Three checks: the gate (may this model's KV be reused at all; run once and remembered), the probe (does this
machine still compute the KV that was stored), and the identity (are the loaded weights those that the
namespace names).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blendrag.corpus.manifest import Manifest
from blendrag.engine.loaded_as import LoadedAs, difference, recorded, records_of
from blendrag.engine.neighbours import context_ids
from blendrag.engine.store_writer import StoreWriter
from blendrag.errors import (
    CorruptKVError,
    IdentityChangedError,
    ModelLoadError,
    StoreUnavailableError,
    UnsupportedModelError,
)
from blendrag.fusor import verdicts
from blendrag.fusor.gate import Verification, verify
from blendrag.model.adapter import ModelAdapter
from blendrag.model.kv_compare import content, magnitude, misfit
from blendrag.model.placement import PlacedModel
from blendrag.model.sharing import before_layers
from blendrag.serving.coroutine import give_way
from blendrag.store.base import ForeignKVError, KVReader, Probe
from blendrag.store.encodings.codec import codec_of, staging_of
from blendrag.store.identity import ChunkRecipe, ModelIdentity, exact_key, probe_key
from blendrag.store.kv import ChunkKV, dtype_name
from blendrag.store.tiered import KVStore
from blendrag.wording import log_step, short_model

log = logging.getLogger(__name__)

#: Tokens of the probe entry, which is stored once per namespace and recomputed to compare.
PROBE_TOKENS = 32
#: Largest difference to the stored probe, relative to how much a channel differs from token to token.
PROBE_TOLERANCE = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
#: Share of what was computed behind similar chunks in its mean with the chunk alone (docs/quality/tried.md).
BEHIND_SHARE = 2 / 3
#: The gate is announced if it is expected to take this long, in seconds (sliding windows need long prompts).
ANNOUNCED_S = 3.0


#: A model that computes KV. The tokens of the second are placed.
Encodes = ModelAdapter | PlacedModel
#: A method of such a model: KV of the second ids after the first, at most with ``context_ids=`` between them.
Encoder = Callable[..., ChunkKV]
#: Measures whether a model's KV may be reused; takes the model, and what announces how long the rest takes.
Gate = Callable[[Any, Callable[[int, float], None]], Verification]


class KVValidity:
    """Validity of one model's KV in one store. Methods that compute take the model's lock."""

    def __init__(
        self,
        adapter: Encodes,
        store: KVStore,
        root: Path,
        manifest: Callable[[], Manifest],
        gate: Gate | None = None,
        writer: StoreWriter | None = None,
        recipe: Callable[[], ChunkRecipe] = ChunkRecipe,
    ) -> None:
        """``manifest``: with the prefix and the encoding of KV that is stored now. ``gate``: instead of that
        of blending. ``writer``: that of ``recipe``, by which chunks are encoded now."""
        self._gate: Gate = gate or verify
        self._adapter = adapter
        self._store = store
        self._root = root
        self._manifest = manifest
        self._writer = writer
        self._recipe = recipe
        self._valid: dict[str, bool] = {}
        self._verified: dict[str, bool] = {}
        """Verdicts of the gate that were looked up."""
        self._why_not: dict[str, str] = {}
        self._recorded: set[str] = set()
        self._recipes: dict[str, ChunkRecipe] = {}
        """Those of the namespaces that the model had so far."""

    @property
    def namespace(self) -> str:
        """Namespace of the loaded model's KV in this store's encoding."""
        recipe = self.recipe
        namespace = self._identity_by(recipe).namespace
        self._recipes[namespace] = recipe
        return namespace

    @property
    def recipe(self) -> ChunkRecipe:
        return self._recipe()

    def recipe_of(self, namespace: str) -> ChunkRecipe:
        """How the chunks of ``namespace`` are encoded; the corpus may have another recipe by now."""
        return self._recipes.get(namespace) or self.recipe

    def _identity_by(self, recipe: ChunkRecipe) -> ModelIdentity:
        return self._adapter.identity.encoded(self._manifest().encoding).by(recipe)

    @property
    def trouble(self) -> str:
        """Why chunks cannot be encoded, because their writer is lost; empty if they can."""
        return self._writer.trouble if self._writer is not None else ""

    def is_admitted(self, namespace: str) -> bool:
        """Whether :meth:`admit` has nothing left to compute."""
        return self._valid.get(namespace, False)

    # -- the gate -------------------------------------------------------------------------------

    def verification(self) -> Verification:
        """The gate's result for the loaded model: the remembered one, or run now and remembered.

        The gate runs over native KV; its result holds for every encoding.
        """
        if self._adapter.refusal is not None:
            return Verification("refused", self._adapter.refusal, ())
        namespace = self._adapter.identity.namespace
        known = verdicts.recall(namespace, self._adapter.device)
        if known is None:
            with before_layers(self._adapter.decoder_layers, give_way):  # it may take minutes
                known = self._gate(self._adapter, self._announce)
            verdicts.remember(namespace, self._adapter.device, known)
        return known

    @property
    def is_verified(self) -> bool:
        """Whether the gate is known to hold for the loaded model; does not run it."""
        namespace = self._adapter.identity.namespace
        if namespace not in self._verified:
            known = verdicts.recall(namespace, self._adapter.device)
            if known is None:
                return False
            self._verified[namespace] = known.blendable
        return self._verified[namespace]

    def _announce(self, tokens: int, seconds: float) -> None:
        if seconds >= ANNOUNCED_S:
            log_step(
                log,
                "checking once whether KV of %s may be reused: a prompt of %s tokens, about %.0f s",
                *(short_model(self._adapter.model_id), f"{tokens:,}", seconds),
            )

    def require_verified(self) -> None:
        """Raise :class:`UnsupportedModelError` unless the gate holds for the loaded model."""
        result = self.verification()
        if not result.blendable:
            raise UnsupportedModelError(f"{self._adapter.model_id}: {result.reason}")

    # -- the probe ------------------------------------------------------------------------------

    def is_valid(self, namespace: str) -> bool:
        """Whether KV stored under ``namespace``, here or in a remote, is still what the model computes.

        Catches changes that no fingerprint covers, such as a new transformers version or another kernel.
        Checked once per namespace, and only if something is stored there. KV without a probe entry is
        invalid. A remote that does not answer is asked again later, and not used until then. Raises
        :class:`UnsupportedModelError` if the gate fails.
        """
        try:
            if self._is_valid_here(namespace):
                self._store.agrees(namespace, partial(self._remote_probe, namespace))
                return True
        except ForeignKVError as error:
            self._why_not[namespace] = str(error)
        return False

    def why_invalid(self, namespace: str) -> str:
        return self._why_not.get(namespace, "it cannot be checked")

    def difference(self, namespace: str) -> str:
        """How the loaded model differs from the one whose KV that other namespace holds; empty if it is not
        known."""
        then = recorded(self._root, namespace)
        return "" if then is None else difference(then.identity, self._identity_by(self.recipe))

    def _is_valid_here(self, namespace: str) -> bool:
        if namespace not in self._valid:
            if next(iter(self._store.keys(namespace)), None) is None:
                return True
            self.require_verified()
            wrong = self._wrong_with_probe(namespace)
            self._valid[namespace] = not wrong
            if wrong:
                self._why_not[namespace] = f"{wrong}; ingest again to renew it"
                log.warning(
                    "store %s: KV of model %s is not used because %s; ingest again to renew it",
                    *(self._root, self._adapter.model_id, wrong),
                )
        return self._valid[namespace]

    def renew(self, namespace: str) -> None:
        """Prepare ``namespace`` for an ingest: delete invalid KV, put a probe into an empty remote.

        Raises :class:`ForeignKVError` if the remote's KV is invalid, and :class:`ModelLoadError` if the
        writer is lost that would encode deleted KV again.
        """
        if not self._is_valid_here(namespace):
            if trouble := self.trouble:  # nothing could be stored instead
                raise ModelLoadError(trouble)
            self.require_identity(namespace)  # by another recipe its probe has another key
            for key in list(self._store.keys(namespace)):
                self._store.delete(namespace, key)
            self._valid[namespace] = True
        self._store.agrees(namespace, partial(self._remote_probe, namespace), create=True)

    def _wrong_with_probe(self, namespace: str) -> str:
        """Why KV stored there cannot be used, or empty.

        A store that was filled only from a remote has the remote's probe.
        """
        layout = self._adapter.layout.encoded(self._manifest().encoding)
        own = self.probe_key(namespace), self._manifest().prefix_ids
        for key, prefix in (own, (probe_key(namespace), ())):
            reader = self._store.open(namespace, key, layout, PROBE_TOKENS)
            if reader is None:
                continue
            with closing(reader):
                try:
                    if self._is_alike(namespace, prefix, reader):
                        return ""
                except (CorruptKVError, StoreUnavailableError):
                    return "its probe entry is damaged"
            then, now = recorded(self._root, namespace), LoadedAs.now(self._adapter.identity)
            versions = then.versions(now) if then is not None else ""
            computed = "this machine computes different KV than the ingest"
            return f"{computed} ({versions or 'another library version or kernel?'})"
        return "its probe entry is missing or damaged"

    def _is_alike(self, namespace: str, prefix: tuple[int, ...], reader: KVReader) -> bool:
        now = self._encoded_probe(namespace, prefix)
        composition = getattr(self._adapter, "composition", None)
        are_alike = None if composition is None else composition.is_alike
        return _alike(now, reader, PROBE_TOLERANCE[dtype_name(self._adapter.precision)], are_alike)

    def _remote_probe(self, namespace: str) -> Probe:
        """That of the remote has no prefix, because corpora with different ones may share it."""

        def compute() -> ChunkKV:
            self.require_verified()
            return self._encoded_probe(namespace, ())

        def is_alike(reader: KVReader) -> bool:
            self.require_verified()
            return self._is_alike(namespace, (), reader)

        layout = self._adapter.layout.encoded(self._manifest().encoding)
        return Probe(layout, PROBE_TOKENS, compute, is_alike)

    def _encoded_probe(self, namespace: str, prefix: tuple[int, ...]) -> ChunkKV:
        """By the model alone, so that it can be compared when the writer is lost: the identity covers the
        recipe, and :class:`FittedWriter` checks that it changes every layer that it names."""
        return self.encode(namespace, self._probe_ids(), prefix)

    def _probe_ids(self) -> tuple[int, ...]:
        vocab = self._adapter.model.get_input_embeddings().num_embeddings
        return tuple((7919 * i + 13) % vocab for i in range(PROBE_TOKENS))

    def probe_key(self, namespace: str) -> str:
        """Key of the entry by which stored KV is compared with what the model computes."""
        prefix = self._manifest().prefix_ids
        return exact_key(namespace, prefix, self._probe_ids(), self.recipe_of(namespace).is_exact)

    # -- the identity ---------------------------------------------------------------------------

    def encode(
        self,
        namespace: str,
        ids: Sequence[int],
        prefix: Sequence[int],
        encoder: Encoder | None = None,
    ) -> ChunkKV:
        """KV of ``ids`` after ``prefix``, computed by the model that ``namespace`` names, alone.

        ``encoder``: another method of the model than ``encode``. Raises :class:`IdentityChangedError` if the
        loaded model is no longer that one.
        """
        with self._adapter.lock:
            self._require(namespace, self.recipe)
            return self.encoded(self._computed(encoder, "", ids, prefix))

    def encode_chunk(
        self,
        namespace: str,
        ids: Sequence[int],
        prefix: Sequence[int],
        encoder: Encoder | None = None,
        context: Sequence[int] = (),
        alone: ChunkKV | None = None,
    ) -> ChunkKV:
        """KV of a chunk by the recipe.

        With a ``context`` it is the mean of two computations, alone and, counted twice, behind the context,
        because a chunk has then read less of what its prompts do not contain (docs/encode-after.md). Records
        of running states have no mean, so models with such states compute it behind the context only.
        ``alone``: what :meth:`encode` returned for it. Other arguments and errors as there;
        :class:`ModelLoadError` if the writer is lost or does not fit.
        """
        with self._adapter.lock:
            recipe = self.recipe
            self._require(namespace, recipe)
            compute = partial(self._computed, encoder, recipe.writer, ids, prefix)
            is_behind = bool(context and recipe.encode_after)
            behind = compute(context) if is_behind else None
            if behind is not None and behind.layout.has_states:
                return self.encoded(behind)
            own = alone if alone is not None and not recipe.writer else compute()
            return self.encoded(own if behind is None else behind.mean_with(own, BEHIND_SHARE))

    def _computed(
        self,
        encoder: Encoder | None,
        writer: str,
        ids: Sequence[int],
        prefix: Sequence[int],
        context: Sequence[int] = (),
    ) -> ChunkKV:
        encode: Encoder = encoder or self._adapter.encode
        with self._with_writer(writer, len(prefix) + len(context), len(ids)):
            return encode(prefix, ids, context_ids=context) if context else encode(prefix, ids)

    def context(
        self, others: Iterable[Sequence[int]], tokens: int, is_long: bool = False
    ) -> tuple[int, ...]:
        """What a chunk of so many ``tokens`` is encoded after, behind the prefix: ``others`` as far as the
        recipe says and the model has room for them. The nearest of ``others`` comes first there, and last
        in the context.

        Raises :class:`InvalidInputError` if there is room for none.
        """
        adapter, most = self._adapter, self.recipe.encode_after
        if not most or not isinstance(adapter, ModelAdapter):
            return ()
        limit = adapter.encoded_alike(is_long)
        return context_ids(others, most, len(self._manifest().prefix_ids), tokens, limit)

    def _with_writer(self, writer: str, skip: int, tokens: int) -> AbstractContextManager[None]:
        if self._writer is None:
            return nullcontext()
        assert isinstance(self._adapter, ModelAdapter)
        return self._writer.active(self._adapter, writer, skip, tokens)

    def require_identity(self, namespace: str) -> None:
        """Raise :class:`IdentityChangedError` if the loaded model is not the one that ``namespace`` names."""
        self._require(namespace, self.recipe)

    def _require(self, namespace: str, recipe: ChunkRecipe) -> None:
        if self._identity_by(recipe).namespace != namespace:
            raise IdentityChangedError(
                f"the weights or adapters of {self._adapter.model_id} changed while KV was being "
                "computed; nothing wrong was stored, start again"
            )

    def encoded(self, kv: ChunkKV) -> ChunkKV:
        """``kv`` as this store will keep it."""
        return replace(kv, layout=kv.layout.encoded(self._manifest().encoding))

    def admit(self, namespace: str) -> None:
        """Prepare ``namespace`` for writing: the gate has passed, the probe entry is stored and pinned.

        Raises :class:`UnsupportedModelError`, :class:`StoreFullError`, and :class:`IdentityChangedError` if
        the KV stored there is invalid (see :meth:`renew`), :class:`ForeignKVError` if that of the remote is.
        """
        self.require_verified()
        if not self._is_valid_here(namespace):
            raise IdentityChangedError(
                f"store {self._root} holds KV that {self._adapter.model_id} no longer computes on this "
                "machine; nothing was added, ingest again to renew it"
            )
        self._store.agrees(namespace, partial(self._remote_probe, namespace), create=True)
        key = self.probe_key(namespace)
        if key not in self._store.where(namespace, [key], durable=True):
            kv = self._encoded_probe(namespace, self._manifest().prefix_ids)
            self._store.put(namespace, key, kv)
        self._store.pin(namespace, key)
        self._valid.setdefault(namespace, True)
        self.record(namespace)

    def record(self, namespace: str) -> None:
        """Keep how the model was loaded, once."""
        if namespace in self._recorded:
            return
        self._recorded.add(namespace)
        now = LoadedAs.now(self._identity_by(self.recipe))
        if now.identity.namespace == namespace and recorded(self._root, namespace) != now:
            with suppress(OSError):  # it only explains
                records_of(self._root, namespace).keep(now)


def _alike(
    now: ChunkKV,
    reader: KVReader,
    tolerance: float,
    states_alike: Callable[[int, torch.Tensor, torch.Tensor, float], bool] | None = None,
) -> bool:
    """Whether stored K and V equal the computed ones per channel, up to ``tolerance`` and the encoding, and
    whether what is stored of running states is ``states_alike``.

    Raises :class:`CorruptKVError` if a checksum fails.
    """
    for i, (layer, encoded) in enumerate(zip(now.layers, _encoded(now), strict=True)):
        stored = torch.empty_like(layer)
        reader.read_layer(i, stored)
        if now.layout.layers[i].is_state:
            assert states_alike is not None
            if not states_alike(i, layer, stored, tolerance):
                return False
            continue
        split = now.layout.layers[i].split
        for fresh, there, kept in zip(split(layer), split(encoded), split(stored), strict=True):
            lost = (there.float() - fresh.float()).square().mean(-2, keepdim=True).sqrt()
            noise = tolerance * content(fresh, fresh.roll(1, -2))
            rounding = torch.finfo(fresh.dtype).eps * magnitude(fresh, kept)
            if not misfit(kept, there, noise + rounding + lost).fits:
                return False
    return True


def _encoded(kv: ChunkKV) -> Iterator[torch.Tensor]:
    """The layers of ``kv`` after encoding and decoding."""
    codec, staging = codec_of(kv.layout), staging_of(kv.layout, kv.tokens)
    for i, layer in enumerate(kv.layers):
        if codec is None or staging is None or kv.layout.layers[i].is_state:
            yield layer
            continue
        stored, out = codec.encode(i, layer), torch.empty_like(layer)

        def fill(room: Any, stored: torch.Tensor = stored) -> None:
            ctypes.memmove(room, stored.data_ptr(), stored.numel())

        staging.read(i, fill, out)
        yield out
