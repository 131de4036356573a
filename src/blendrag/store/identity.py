"""Who computed a KV, from what: fingerprints, the store namespace, the chunk key.

A key answers "would this model, loaded this way, compute exactly these bytes for these ids behind
this prefix?" Everything that can change the answer is a field. SHA-256 over length-prefixed
fields; never ``hash()``, never 64 bits. Knows nothing of files or of how a model is loaded.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

#: Raised whenever the meaning of stored bytes changes; old stores then miss instead of lying.
FORMAT_VERSION = 1

#: How the KV is laid out and encoded at rest.
LAYOUT = "layer-major [2,Hkv,T,D]"
NATIVE_ENCODING = "native"


def digest_fields(fields: Iterable[bytes]) -> str:
    """SHA-256 hex over the fields, each preceded by its length as u64, so that none can run over."""
    sha = hashlib.sha256()
    for field in fields:
        sha.update(struct.pack("<Q", len(field)))
        sha.update(field)
    return sha.hexdigest()


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as u32 little-endian behind their count."""
    return struct.pack(f"<Q{len(ids)}I", len(ids), *ids)


@dataclass(frozen=True)
class ModelIdentity:
    """All that decides which KV a loaded model computes."""

    model_id: str
    revision: str
    tensors_fingerprint: str
    """xxh3-128 hex over names, shapes, dtypes and bytes of the loaded tensors."""
    adapters: str
    """Active LoRA adapters, empty where there are none."""
    weight_quantization: str
    """Quantisation method of the weights, ``"none"`` for plain float weights."""
    compute_dtype: str
    attention: str
    """Attention implementation the KV was computed with: kernels differ in the last bits."""
    geometry: str
    """Canonical JSON: layers, KV heads, head dims, rotary configuration, sliding windows."""
    tokenizer_fingerprint: str
    stored_dtype: str
    encoding: str = NATIVE_ENCODING
    """How a store keeps the KV: other bytes, so another namespace."""

    def encoded(self, encoding: str) -> ModelIdentity:
        """The same model, its KV stored in another way."""
        return replace(self, encoding=encoding)

    @property
    def namespace(self) -> str:
        """64 hex digits naming this identity's part of a store."""
        fields = [str(FORMAT_VERSION).encode(), LAYOUT.encode()]
        for name, value in sorted(asdict(self).items()):
            fields += [name.encode(), str(value).encode()]
        return digest_fields(fields)


def chunk_key(namespace: str, prefix_ids: Sequence[int], chunk_ids: Sequence[int]) -> str:
    """Key of the KV of ``chunk_ids`` encoded behind ``prefix_ids`` (64 hex digits)."""
    return digest_fields([b"chunk", namespace.encode(), pack_ids(prefix_ids), pack_ids(chunk_ids)])
