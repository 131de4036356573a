"""The payload file of one chunk: a safetensors file with a header that can be foretold.

Owns the bytes; knows nothing of directories, indexes or limits. Layer-major tensors ``l0000``,
``l0001``, … each ``[2, Hkv, T, D]``, the header padded with spaces so that data starts at a
multiple of 4096, and in ``__metadata__`` the format version, the key, the namespace, the dtype, the
number of tokens and one xxh3-64 per layer, seeded with key and layer, over the layer's bytes as they
are stored. Where the KV is encoded, ``__metadata__`` says how, and each layer is several tensors,
its scales before its numbers (:mod:`blendrag.store.encodings`).

Everything in the header except the checksums is known before a file is opened. So a file is never
parsed to be read: its header is compared, byte for byte, with the one that layout, tokens,
namespace and key require, and no number found in it is computed with. Only :func:`describe`, with
which an index is rebuilt, parses, and what it returns has passed the same comparison.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import xxhash

from blendrag.errors import InvalidInputError
from blendrag.store.encodings import ENCODINGS, stored_layer_bytes, stored_parts
from blendrag.store.identity import FORMAT_VERSION, NATIVE_ENCODING
from blendrag.store.kv import ITEM_BYTES, KVLayout, LayerShape

ALIGNMENT_BYTES = 4096
MAX_HEADER_BYTES = 1 << 20
_MAX_DIMENSION = 1 << 31

_LAYER = re.compile(r"l[0-9]{4,}", re.ASCII)
_HEX64 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_CHECKSUM_DIGITS = 16
_SEED_STEP = 0x9E37_79B9_7F4A_7C15
_U64 = (1 << 64) - 1


def is_name(text: object) -> bool:
    """Whether ``text`` has the form of a key or namespace: 64 lowercase hex digits."""
    return isinstance(text, str) and _HEX64.fullmatch(text) is not None


def layer_seed(key: str, layer: int) -> int:
    """Seed of a layer's checksum: the key's leading 64 bits, moved by a step per layer."""
    return (int(key[:16], 16) + layer * _SEED_STEP) & _U64


def layer_checksum(key: str, layer: int, data: Any) -> int:
    """xxh3-64 of one layer's bytes; those of another key or layer pass by a chance of 2^-64 only."""
    return xxhash.xxh3_64_intdigest(data, layer_seed(key, layer))


@dataclass(frozen=True)
class Frame:
    """The fixed part of all headers of one layout and number of tokens."""

    before_checksums: bytes
    before_key: bytes
    before_namespace: bytes
    rest: bytes
    offsets: tuple[int, ...]
    """Where each layer begins in the file, and behind the last one where the file ends."""

    @property
    def header_bytes(self) -> int:
        return self.offsets[0]

    @property
    def file_bytes(self) -> int:
        return self.offsets[-1]

    @property
    def layers(self) -> int:
        return len(self.offsets) - 1

    def header(self, namespace: str, key: str, checksums: list[int]) -> bytes:
        """The header of one file, its length field included."""
        digits = "".join(f"{checksum:0{_CHECKSUM_DIGITS}x}" for checksum in checksums)
        return b"".join(
            (
                self.before_checksums,
                digits.encode(),
                self.before_key,
                key.encode(),
                self.before_namespace,
                namespace.encode(),
                self.rest,
            )
        )

    def checksums(self, header: bytes, namespace: str, key: str) -> list[int] | None:
        """Checksums in a header read from disk, or ``None`` if anything else in it differs."""
        start = len(self.before_checksums)
        end = start + _CHECKSUM_DIGITS * self.layers
        digits = header[start:end]
        try:
            checksums = [
                int(digits[i : i + _CHECKSUM_DIGITS], 16)
                for i in range(0, len(digits), _CHECKSUM_DIGITS)
            ]
        except ValueError:
            return None
        if len(checksums) != self.layers or any(checksum < 0 for checksum in checksums):
            return None
        return checksums if header == self.header(namespace, key, checksums) else None


@lru_cache(maxsize=1024)
def frame(layout: KVLayout, tokens: int) -> Frame:
    """What the files of chunks with this layout and number of tokens look like."""
    _check(layout, tokens)
    ends = [0]
    for layer in range(len(layout.layers)):
        ends.append(ends[-1] + stored_layer_bytes(layout, layer, tokens))
    header = _fields(layout, tokens, ends)
    before_checksums, before_key, before_namespace, rest = (
        part.encode() for part in json.dumps(header, separators=(",", ":")).split("\\u0000")
    )
    variable = _CHECKSUM_DIGITS * len(layout.layers) + 2 * 64
    fixed = len(before_checksums) + len(before_key) + len(before_namespace) + len(rest)
    data_start = -(-(8 + fixed + variable) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if data_start > MAX_HEADER_BYTES:
        raise InvalidInputError(
            f"a KV of {len(layout.layers)} layers needs a header of {data_start} bytes, "
            f"expected at most {MAX_HEADER_BYTES}; this model has too many layers to store"
        )
    return Frame(
        struct.pack("<Q", data_start - 8) + before_checksums,
        before_key,
        before_namespace,
        rest + b" " * (data_start - 8 - fixed - variable),
        tuple(data_start + end for end in ends),
    )


def _check(layout: KVLayout, tokens: int) -> None:
    if tokens < 1 or not layout.layers or layout.dtype not in ITEM_BYTES:
        raise InvalidInputError(
            f"a KV of {tokens} tokens, {len(layout.layers)} layers, dtype {layout.dtype} cannot "
            f"be stored; expected at least one of each and a dtype of {', '.join(ITEM_BYTES)}"
        )
    if layout.encoding not in ENCODINGS:
        raise InvalidInputError(
            f"a KV cannot be stored in encoding {layout.encoding!r}; expected one of "
            f"{', '.join(ENCODINGS)}"
        )


def _fields(layout: KVLayout, tokens: int, ends: list[int]) -> dict[str, Any]:
    """The header as JSON has it, a NUL wherever one file differs from another."""
    metadata = {
        "blendrag_format": str(FORMAT_VERSION),
        "checksums": "\0",
        "dtype": layout.dtype,
        "key": "\0",
        "namespace": "\0",
        "tokens": str(tokens),
    }
    if layout.encoding != NATIVE_ENCODING:
        metadata["encoding"] = layout.encoding
    fields: dict[str, Any] = {"__metadata__": metadata}
    for layer, begin in enumerate(ends[:-1]):
        for part in stored_parts(layout, layer, tokens):
            fields[f"l{layer:04d}{part.name}"] = {
                "dtype": part.dtype,
                "shape": list(part.shape),
                "data_offsets": [begin, begin + part.size_bytes],
            }
            begin += part.size_bytes
    return fields


@dataclass(frozen=True)
class Description:
    """What a payload file says of itself, found to be consistent."""

    namespace: str
    key: str
    layout: KVLayout
    tokens: int
    frame: Frame
    checksums: tuple[int, ...]
    """One per layer, as the header says; the layers are not looked at."""

    @property
    def file_bytes(self) -> int:
        return self.frame.file_bytes


def describe(header: bytes) -> Description | None:
    """Parse a whole header (length field included); ``None`` unless this version wrote it."""
    if not 8 < len(header) <= MAX_HEADER_BYTES:
        return None
    try:
        fields = json.loads(header[8:], object_pairs_hook=_unique)
        metadata = fields["__metadata__"]
        namespace, key = metadata["namespace"], metadata["key"]
        tokens = _dimension(int(metadata["tokens"]))
        names = [name for name in fields if _LAYER.fullmatch(name)]
        shapes = [fields[f"l{layer:04d}"]["shape"] for layer in range(len(names))]
        layers = tuple(LayerShape(_dimension(s[1]), _dimension(s[3])) for s in shapes)
        encoding = str(metadata.get("encoding", NATIVE_ENCODING))
        layout = KVLayout(layers, str(metadata["dtype"]), encoding)
        expected = frame(layout, tokens)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        return None
    if not (is_name(namespace) and is_name(key)):
        return None
    checksums = expected.checksums(header, namespace, key)
    if checksums is None:
        return None
    return Description(namespace, key, layout, tokens, expected, tuple(checksums))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("duplicate names")
    return dict(pairs)


def _dimension(value: object) -> int:
    if type(value) is not int or not 0 < value < _MAX_DIMENSION:
        raise ValueError("not a dimension")
    return value
