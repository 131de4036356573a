"""Identity of stored KV: model identity, namespace of the store, chunk key.

Equal keys mean that this model, loaded this way, computes exactly these bytes for these ids after this
prefix. Everything that can change the bytes is a field, except the chunks between prefix and chunk in
namespaces with ``encode_after``: there one of several valid variants is stored.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from blendrag.errors import InvalidInputError

#: Increased whenever the meaning of stored bytes changes, so that old stores miss.
FORMAT_VERSION = 1

#: How the KV is laid out and encoded at rest.
LAYOUT = "layer-major [2,Hkv,T,D]"
NATIVE_ENCODING = "native"

#: How namespaces begin that hold KV learned from prompts, which is given up first.
LEARNED_BEGINNING = "1ea12ed0"

_NAME = re.compile(r"[0-9a-f]{64}", re.ASCII)


def is_name(text: object) -> bool:
    """Whether ``text`` has the form of a key or namespace: 64 lowercase hex digits."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def require_name(text: str) -> None:
    """Raise :class:`InvalidInputError` unless ``text`` is a key or a namespace."""
    if not is_name(text):
        raise InvalidInputError(
            f"{text[:64]!r} is not a key or namespace, expected 64 lowercase hex digits"
        )


def digest_fields(fields: Iterable[bytes]) -> str:
    """SHA-256 hex over the fields, each preceded by its length as u64."""
    sha = hashlib.sha256()
    for field in fields:
        sha.update(struct.pack("<Q", len(field)))
        sha.update(field)
    return sha.hexdigest()


def pack_ids(ids: Sequence[int]) -> bytes:
    """The number of token ids as u64, then the ids as u32, all little-endian."""
    return struct.pack(f"<Q{len(ids)}I", len(ids), *ids)


@dataclass(frozen=True)
class ChunkRecipe:
    """How chunks are encoded behind the prefix, if not by the model alone."""

    writer: str = ""
    """Fingerprint of the writer that is active while chunks are encoded, empty if there is none."""
    encode_after: int = 0
    """Most other chunks that a chunk is encoded after; only its own KV is kept."""

    @property
    def is_exact(self) -> bool:
        """Whether a chunk's KV is what a full prefill computes for it directly behind the prefix."""
        return self == ChunkRecipe()

    @property
    def variants(self) -> int:
        """How many KV are stored of each chunk: by the recipe, and by the model alone if that is other KV."""
        return 1 if self.is_exact else 2

    def unlike(self, other: ChunkRecipe) -> str:
        """How it encodes where it differs from ``other``, for messages."""
        writer = f"with writer {self.writer[:12]}" if self.writer else "without a writer"
        parts = [writer] * (self.writer != other.writer)
        after = f"with encode_after {self.encode_after}"
        parts += [after] * (self.encode_after != other.encode_after)
        return " and ".join(parts)


@dataclass(frozen=True)
class ModelIdentity:
    """Everything that decides which KV a loaded model computes."""

    model_id: str
    revision: str
    tensors_fingerprint: str
    """xxh3-128 hex over names, shapes, dtypes and bytes of the loaded tensors."""
    adapters: str
    """Active LoRA adapters, empty if there are none."""
    weight_quantization: str
    """Quantisation method of the weights; ``"none"`` for plain float weights."""
    compute_dtype: str
    attention: str
    """Attention implementation: kernels differ in the last bits."""
    geometry: str
    """Canonical JSON: layers, KV heads, head dims, rotary configuration, sliding windows."""
    tokenizer_fingerprint: str
    stored_dtype: str
    encoding: str = NATIVE_ENCODING
    """How a store keeps the KV (:mod:`blendrag.store.encodings`)."""
    writer: str = ""
    encode_after: int = 0
    """Both of the :class:`ChunkRecipe`."""

    def encoded(self, encoding: str) -> ModelIdentity:
        """The same model with its KV stored in another encoding."""
        return replace(self, encoding=encoding)

    def by(self, recipe: ChunkRecipe) -> ModelIdentity:
        """The same model with its chunks encoded by ``recipe``."""
        return replace(self, writer=recipe.writer, encode_after=recipe.encode_after)

    @property
    def namespace(self) -> str:
        """64 hex digits that name this identity's part of a store."""
        fields = [str(FORMAT_VERSION).encode(), LAYOUT.encode()]
        for name, value in sorted(asdict(self).items()):
            # earlier versions had no recipes
            if name not in ("writer", "encode_after") or value:
                fields += [name.encode(), str(value).encode()]
        if self.encode_after:
            fields.append(b"mean 2:1")  # the share of what is computed behind similar chunks
        return digest_fields(fields)


def learned_namespace(namespace: str, scope: str) -> str:
    """Where the KV is that a model computed of what was learned in ``scope``. Scopes share no KV."""
    name = digest_fields([b"learned", namespace.encode(), scope.encode()])
    return LEARNED_BEGINNING + name[len(LEARNED_BEGINNING) :]


def kv_namespace(namespace: str, scope: str | None, is_long: bool) -> str:
    """Where the KV is of a document (``scope`` ``None``) or of what was learned in ``scope``.

    ``is_long``: computed by the rotary table for long prompts (LongRoPE). That counts as learned, too: no
    remote or archive holds it, and it is evicted first.
    """
    if is_long:
        namespace = learned_namespace(namespace, "long prompts")
    return namespace if scope is None else learned_namespace(namespace, scope)


def kept_namespace(namespace: str, scope: str) -> str:
    """Where the KV of chunks is that prefills of prompts of ``scope`` computed; in memory only."""
    return learned_namespace(learned_namespace(namespace, "prefills"), scope)


def is_learned(namespace: str) -> bool:
    """Whether a namespace holds KV learned from prompts."""
    return namespace.startswith(LEARNED_BEGINNING)


def chunk_key(namespace: str, prefix_ids: Sequence[int], chunk_ids: Sequence[int]) -> str:
    """Key of the KV of ``chunk_ids`` computed after ``prefix_ids`` (64 hex digits)."""
    return digest_fields([b"chunk", namespace.encode(), pack_ids(prefix_ids), pack_ids(chunk_ids)])


def exact_key(
    namespace: str, prefix_ids: Sequence[int], ids: Sequence[int], chunks_are_exact: bool
) -> str:
    """Key of the KV of ``ids`` directly after ``prefix_ids`` by the model alone (64 hex digits).

    A chunk has the same KV, unless the namespace's :class:`ChunkRecipe` says otherwise.
    """
    if chunks_are_exact:
        return chunk_key(namespace, prefix_ids, ids)
    return digest_fields([b"exact", namespace.encode(), pack_ids(prefix_ids), pack_ids(ids)])


def chunk_keys(
    namespace: str, prefix_ids: Sequence[int], ids: Sequence[int], chunks_are_exact: bool
) -> tuple[str, ...]:
    """Keys of all KV of a chunk: by the recipe, and by the model alone if that is other KV.

    The latter is for the first chunk of a prompt, which no other chunk precedes.
    """
    keys = (
        chunk_key(namespace, prefix_ids, ids),
        exact_key(namespace, prefix_ids, ids, chunks_are_exact),
    )
    return tuple(dict.fromkeys(keys))


def beginning_key(namespace: str, ids: Sequence[int], chunks_are_exact: bool) -> str:
    """Key of the exact KV of ``ids`` at the beginning of a prompt (64 hex digits)."""
    return exact_key(namespace, (), ids, chunks_are_exact)


def probe_key(namespace: str) -> str:
    """Key of the entry by which machines compare the KV of a remote's namespace."""
    return digest_fields([b"probe", namespace.encode()])


def module_key(
    namespace: str, ids: Sequence[int], positions: Sequence[int], start: int, end: int
) -> str:
    """Key of the KV of ``ids[start:end]`` of a prompt module (64 hex digits).

    ``ids`` at ``positions`` are computed together, placeholders of parameters included.
    """
    stretch = pack_ids((start, end))
    return digest_fields(
        [b"module", namespace.encode(), pack_ids(ids), pack_ids(positions), stretch]
    )
