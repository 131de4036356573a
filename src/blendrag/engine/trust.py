"""May stored KV be used, and is what is computed now what the store asks for?

Owns three doubts. The gate: may this model's KV be reused at all (run once, remembered)? The probe: is
what was stored still what this machine computes? The identity: are the weights loaded at this moment
those whose namespace the KV goes into? Everything an engine stores is encoded here.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blendrag.errors import CorruptKVError, IdentityChangedError, UnsupportedModelError
from blendrag.fusor.gate import verify
from blendrag.fusor.gate_record import Verification, remember, remembered
from blendrag.model.adapter import ModelAdapter
from blendrag.model.kv_compare import content, magnitude, misfit
from blendrag.store import KVReader, KVStore
from blendrag.store.encodings import codec_of, staging_of
from blendrag.store.identity import NATIVE_ENCODING, chunk_key
from blendrag.store.kv import ChunkKV

log = logging.getLogger(__name__)

#: Tokens of the entry by which a namespace is recognised as still computing the same KV.
PROBE_TOKENS = 32
#: Largest difference to the stored probe, relative to how much a channel differs from token to token.
PROBE_TOLERANCE = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
#: Expected seconds of the gate from which it is announced: a model with sliding windows takes long prompts.
ANNOUNCED_S = 3.0


class Trust:
    """Of one model in one store. Methods that compute take the model's lock."""

    def __init__(
        self,
        adapter: ModelAdapter,
        store: KVStore,
        root: Path,
        prefix_ids: Callable[[], tuple[int, ...]],
        encoding: Callable[[], str] = lambda: NATIVE_ENCODING,
    ) -> None:
        self._adapter = adapter
        self._store = store
        self._root = root
        self._prefix_ids = prefix_ids
        self._encoding = encoding
        self._standing: dict[str, bool] = {}

    @property
    def namespace(self) -> str:
        """Where the KV of what is loaded now belongs, encoded as this store's is."""
        return self._adapter.identity.encoded(self._encoding()).namespace

    # -- the gate -------------------------------------------------------------------------------

    def verification(self) -> Verification:
        """The gate's result for the loaded model: remembered, or run now and remembered.

        It judges the model, over native KV: one verdict for all encodings of it.
        """
        if self._adapter.refusal is not None:
            return verify(self._adapter)
        namespace = self._adapter.identity.namespace
        known = remembered(self._root, namespace, self._adapter.device)
        if known is None:
            known = verify(self._adapter, self._announce)
            if not self._store.read_only:
                self._remember(namespace, known)
        return known

    def _announce(self, tokens: int, seconds: float) -> None:
        if seconds >= ANNOUNCED_S:
            log.warning(
                "checking once whether KV of %s may be reused: a prompt of %s tokens, about %.0f s",
                *(self._adapter.model_id, f"{tokens:,}", seconds),
            )

    def _remember(self, namespace: str, result: Verification) -> None:
        try:
            remember(self._root, namespace, self._adapter.device, result)
        except OSError as exc:  # costs the next process another run of the gate
            log.info("the gate's result cannot be kept in %s: %s", self._root, exc)

    def require_verified(self) -> None:
        """Raise :class:`UnsupportedModelError` unless the gate holds for the loaded model."""
        result = self.verification()
        if not result.blendable:
            raise UnsupportedModelError(f"{self._adapter.model_id}: {result.reason}")

    # -- the probe ------------------------------------------------------------------------------

    def stands(self, namespace: str) -> bool:
        """Whether KV stored under ``namespace`` is still what the model computes.

        Catches what no fingerprint lists: a new transformers, another kernel. Looked at once per
        namespace, and not at all while nothing is stored there. KV without a probe entry beside it
        is not trusted. Raises :class:`UnsupportedModelError` where the gate does not hold.
        """
        if namespace not in self._standing:
            if next(iter(self._store.keys(namespace)), None) is None:
                return True
            self.require_verified()
            self._standing[namespace] = self._probe_agrees(namespace)
        return self._standing[namespace]

    def renew(self, namespace: str) -> None:
        """Drop the namespace's KV if it does not stand; it is computed again by the next ingest."""
        if self.stands(namespace):
            return
        for key in list(self._store.keys(namespace)):
            self._store.delete(namespace, key)
        self._standing[namespace] = True

    def _probe_agrees(self, namespace: str) -> bool:
        ids = self._probe_ids()
        layout = self._adapter.layout.encoded(self._encoding())
        reader = self._store.open(namespace, self._probe_key(namespace), layout, len(ids))
        if reader is None:
            self._warn("the KV kept to check it by is missing or damaged")
            return False
        try:
            now = self.encode(namespace, ids, self._prefix_ids())
            if _alike(now, reader):
                return True
        except CorruptKVError:
            self._warn("the KV kept to check it by is damaged")
            return False
        finally:
            reader.close()
        self._warn("this machine computes other KV (another library version or kernel?)")
        return False

    def _warn(self, why: str) -> None:
        log.warning(
            "store %s: KV of model %s is not used, as %s; ingest again to renew it",
            self._root,
            self._adapter.model_id,
            why,
        )

    def _probe_ids(self) -> tuple[int, ...]:
        vocab = self._adapter.model.get_input_embeddings().num_embeddings
        return tuple((7919 * i + 13) % vocab for i in range(PROBE_TOKENS))

    def _probe_key(self, namespace: str) -> str:
        return chunk_key(namespace, self._prefix_ids(), self._probe_ids())

    # -- the identity ---------------------------------------------------------------------------

    def encode(self, namespace: str, ids: Sequence[int], prefix: Sequence[int]) -> ChunkKV:
        """KV of ``ids`` behind ``prefix``, computed by the model that ``namespace`` names.

        Raises :class:`IdentityChangedError` when that is not what is loaded any more.
        """
        with self._adapter.lock:
            encoding = self._encoding()
            if self._adapter.identity.encoded(encoding).namespace != namespace:
                raise IdentityChangedError(
                    f"the weights or adapters of {self._adapter.model_id} changed while KV was being "
                    "computed; nothing wrong was stored, start again"
                )
            kv = self._adapter.encode(prefix, ids)
            return replace(kv, layout=kv.layout.encoded(encoding))

    def admit(self, namespace: str) -> None:
        """Make ``namespace`` ready to be stored under: gate passed, probe entry in place and pinned.

        Raises :class:`UnsupportedModelError`, :class:`StoreFullError`, and
        :class:`IdentityChangedError` where other KV stands there than the model computes (see
        :meth:`renew`): what follows would be mixed with it.
        """
        self.require_verified()
        if not self.stands(namespace):
            raise IdentityChangedError(
                f"store {self._root} holds KV that {self._adapter.model_id} no longer computes on this "
                "machine; nothing was stored beside it, ingest again to renew it"
            )
        key = self._probe_key(namespace)
        if not self._store.contains(namespace, key):
            kv = self.encode(namespace, self._probe_ids(), self._prefix_ids())
            self._store.put(namespace, key, kv)
        self._store.pin(namespace, key)
        self._standing.setdefault(namespace, True)


def _alike(now: ChunkKV, reader: KVReader) -> bool:
    """Whether K and V each are what was stored, channel by channel, but for noise and the encoding's error.

    Raises :class:`CorruptKVError` for bytes that are not those that were put.
    """
    for i, (layer, encoded) in enumerate(zip(now.layers, _encoded(now), strict=True)):
        stored = torch.empty_like(layer)
        reader.read_layer(i, stored)
        for kind in range(2):  # K, V
            fresh, there, kept = layer[kind], encoded[kind], stored[kind]  # [Hkv, T, D]
            lost = (there.float() - fresh.float()).square().mean(-2, keepdim=True).sqrt()
            noise = PROBE_TOLERANCE[now.layout.dtype] * content(fresh, fresh.roll(1, -2))
            rounding = torch.finfo(fresh.dtype).eps * magnitude(fresh, kept)
            if not misfit(kept, there, noise + rounding + lost).fits:
                return False
    return True


def _encoded(kv: ChunkKV) -> Iterator[torch.Tensor]:
    """The layers of ``kv`` as its store would give them back."""
    codec, staging = codec_of(kv.layout), staging_of(kv.layout, kv.tokens)
    for i, layer in enumerate(kv.layers):
        if codec is None or staging is None:
            yield layer
            continue
        stored, out = codec.encode(i, layer), torch.empty_like(layer)

        def fill(room: Any, stored: torch.Tensor = stored) -> None:
            ctypes.memmove(room, stored.data_ptr(), stored.numel())

        staging.read(i, fill, out)
        yield out
