"""The payload file of one chunk: a safetensors file whose header can be predicted.

Tensors ``l0000``, ``l0001``, … of shape ``[2, Hkv, T, D]`` (or ``[1, Hkv, T, Dk+Dv]``, see
:class:`~blendrag.store.kv.LayerShape`) follow one another; what a chunk does to a running state is bytes
(``U8``). The header is padded with spaces so that data starts at a multiple of 4096. Its
``__metadata__`` holds the format version, key, namespace, dtype, number of tokens, and one xxh3-64
checksum per layer, seeded with key and layer, over the layer's stored bytes. An encoded layer consists
of several tensors, scales first (:mod:`blendrag.store.encodings`), and the metadata names the encoding.

To read a file, its header is compared byte by byte with the one that layout, tokens, namespace and key
require; it is not parsed, and no number in it is used. Only :func:`parse_header`, for rebuilding an
index and for maintenance, parses, and its result has passed the same comparison.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import xxhash

from blendrag.errors import CorruptKVError, InvalidInputError
from blendrag.store.durable import OUT_OF_RESOURCES
from blendrag.store.encodings import ENCODINGS, stored_bytes_by_layer, stored_parts
from blendrag.store.identity import FORMAT_VERSION, NATIVE_ENCODING, is_name
from blendrag.store.kv import ITEM_BYTES, KVLayout, LayerShape, StateShape
from blendrag.store.payload_files import Name, PayloadFiles

ALIGNMENT_BYTES = 4096
MAX_HEADER_BYTES = 1 << 20
#: Bytes of one of :func:`verified_pieces`.
PIECE_BYTES = 1 << 20

_MAX_DIMENSION = 1 << 31
_LAYER = re.compile(r"l[0-9]{4,}", re.ASCII)
_HEX = re.compile(rb"[0-9a-f]*")
_CHECKSUM_DIGITS = 16
_SEED_STEP = 0x9E37_79B9_7F4A_7C15
_U64 = (1 << 64) - 1


def layer_seed(key: str, layer: int) -> int:
    """Seed of a layer's checksum: the key's leading 64 bits, moved by one step per layer."""
    return (int(key[:16], 16) + layer * _SEED_STEP) & _U64


def layer_checksum(key: str, layer: int, data: Any) -> int:
    """xxh3-64 of one layer's bytes. Bytes of another key or layer match with a chance of 2^-64."""
    return xxhash.xxh3_64_intdigest(data, layer_seed(key, layer))


# -- the expected header -------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """The fixed part of the header for one layout and number of tokens, and where the layers are."""

    fixed: tuple[bytes, bytes, bytes, bytes]
    """Between them are the checksums, the key and the namespace."""
    offsets: tuple[int, ...]
    """Where each layer begins in the file; the last one is the end of the file."""

    @property
    def header_bytes(self) -> int:
        return self.offsets[0]

    @property
    def file_bytes(self) -> int:
        return self.offsets[-1]

    def header(self, namespace: str, key: str, checksums: Sequence[int]) -> bytes:
        """The header of one file, including its length field."""
        digits = struct.pack(f">{len(checksums)}Q", *checksums).hex().encode()
        return self._header(namespace, key, digits)

    def _header(self, namespace: str, key: str, digits: bytes) -> bytes:
        first, second, third, last = self.fixed
        return b"".join((first, digits, second, key.encode(), third, namespace.encode(), last))

    def checksums(self, header: bytes, namespace: str, key: str) -> list[int] | None:
        """Checksums in a header read from disk, or ``None`` if anything else in it differs."""
        start, layers = len(self.fixed[0]), len(self.offsets) - 1
        digits = header[start : start + _CHECKSUM_DIGITS * layers]
        if _HEX.fullmatch(digits) is None or header != self._header(namespace, key, digits):
            return None
        return list(struct.unpack(f">{layers}Q", bytes.fromhex(digits.decode())))


@lru_cache(maxsize=1024)
def frame(layout: KVLayout, tokens: int) -> Frame:
    """The header of chunks with this layout and number of tokens.

    Raises :class:`InvalidInputError` for a layout that cannot be stored.
    """
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
    ends = [0, *accumulate(stored_bytes_by_layer(layout, tokens))]
    fields = _header_fields(layout, tokens, ends)
    first, second, third, last = (
        part.encode() for part in json.dumps(fields, separators=(",", ":")).split("\\u0000")
    )
    used = 8 + len(first + second + third + last) + _CHECKSUM_DIGITS * len(layout.layers) + 2 * 64
    data_start = -(-used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if data_start > MAX_HEADER_BYTES:
        raise InvalidInputError(
            f"a KV of {len(layout.layers)} layers needs a header of {data_start} bytes, "
            f"expected at most {MAX_HEADER_BYTES}; this model has too many layers to store"
        )
    length = struct.pack("<Q", data_start - 8)
    padding = b" " * (data_start - used)
    return Frame(
        (length + first, second, third, last + padding), tuple(data_start + end for end in ends)
    )


def _header_fields(layout: KVLayout, tokens: int, ends: list[int]) -> dict[str, Any]:
    """The header's JSON, with a NUL wherever one file differs from another."""
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
    if any(shape.value_dim for shape in layout.layers):
        metadata["value_dims"] = ",".join(str(shape.value_dim or 0) for shape in layout.layers)
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


# -- files whose model is not known --------------------------------------------------------------


@dataclass(frozen=True)
class PayloadHeader:
    """What a payload file says about itself, found to be consistent."""

    namespace: str
    key: str
    layout: KVLayout
    tokens: int
    frame: Frame
    checksums: tuple[int, ...]
    """One per layer, as in the header; the layers themselves are not verified."""

    @property
    def file_bytes(self) -> int:
        return self.frame.file_bytes

    @property
    def encoded(self) -> bytes:
        """The header's bytes, including its length field."""
        return self.frame.header(self.namespace, self.key, self.checksums)


def parse_header(header: bytes) -> PayloadHeader | None:
    """Parse a whole header, including its length field; ``None`` unless this version wrote it."""
    if not 8 < len(header) <= MAX_HEADER_BYTES:
        return None
    try:
        fields = json.loads(header[8:], object_pairs_hook=_unique)
        metadata = fields["__metadata__"]
        namespace, key = metadata["namespace"], metadata["key"]
        tokens = _dimension(int(metadata["tokens"]))
        layers = [name for name in fields if _LAYER.fullmatch(name)]
        shapes = [fields[f"l{layer:04d}"]["shape"] for layer in range(len(layers))]
        widths = (
            metadata["value_dims"].split(",") if "value_dims" in metadata else ["0"] * len(shapes)
        )
        dtypes = [fields[f"l{layer:04d}"]["dtype"] for layer in range(len(layers))]
        layout = KVLayout(
            tuple(
                _layer_shape(*each) for each in zip(dtypes, shapes, map(int, widths), strict=True)
            ),
            str(metadata["dtype"]),
            str(metadata.get("encoding", NATIVE_ENCODING)),
        )
        expected = frame(layout, tokens)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        return None
    if not (is_name(namespace) and is_name(key)):
        return None
    checksums = expected.checksums(header, namespace, key)
    if checksums is None:
        return None
    return PayloadHeader(namespace, key, layout, tokens, expected, tuple(checksums))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("duplicate names")
    return dict(pairs)


def _layer_shape(dtype: str, shape: Sequence[Any], value_dim: int) -> LayerShape:
    heads, width = _dimension(shape[1]), _dimension(shape[3])
    if dtype == "U8":
        return StateShape(width)
    return (
        LayerShape(heads, width - value_dim, value_dim) if value_dim else LayerShape(heads, width)
    )


def _dimension(value: object) -> int:
    if type(value) is not int or not 0 < value < _MAX_DIMENSION:
        raise ValueError("not a dimension")
    return value


#: Gives the next bytes, up to that many; fewer only at the end.
Read = Callable[[int], bytes]


def read_header(read: Read, namespace: str, key: str, size_bytes: int) -> PayloadHeader:
    """Header of a payload of that size, read from its beginning.

    Reads at most one header's bytes. Raises :class:`CorruptKVError` unless it fits namespace, key
    and size.
    """
    length = read(8)
    header_bytes = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
    if header_bytes <= MAX_HEADER_BYTES:
        header = parse_header(length + read(header_bytes))
        found = header and (header.namespace, header.key, header.file_bytes)
        if header is not None and found == (namespace, key, size_bytes):
            return header
    raise CorruptKVError("its header or size is not what was put")


@contextlib.contextmanager
def open_payload(files: PayloadFiles, name: Name) -> Iterator[tuple[PayloadHeader, Read]]:
    """A payload's header, and what reads the bytes after it.

    Raises :class:`CorruptKVError` if the file is damaged, and ``OSError`` where nothing is known
    about it: it is gone, this user may not read it, or this process has no descriptor left.
    """
    try:
        fd = files.open(name)
    except OSError as exc:
        if isinstance(exc, FileNotFoundError | PermissionError) or exc.errno in OUT_OF_RESOURCES:
            raise
        raise CorruptKVError(f"cannot be read ({exc.strerror or exc})") from exc
    try:
        read = partial(read_next, fd)
        yield read_header(read, name.namespace, name.key, os.fstat(fd).st_size), read
    finally:
        os.close(fd)


def read_next(fd: int, size_bytes: int) -> bytes:
    """The next bytes of a payload; a single ``read`` may be cut short.

    Raises :class:`CorruptKVError` if they cannot be read.
    """
    parts = []
    try:
        while size_bytes and (part := os.read(fd, size_bytes)):
            parts.append(part)
            size_bytes -= len(part)
    except OSError as exc:
        raise CorruptKVError(f"cannot be read ({exc.strerror or exc})") from exc
    return b"".join(parts)


def verified_pieces(header: PayloadHeader, read: Read) -> Iterator[bytes]:
    """The bytes after the header, in order.

    Raises :class:`CorruptKVError` at the end of a layer with a wrong checksum; discard what came
    before.
    """
    for layer, (begin, end) in enumerate(pairwise(header.frame.offsets)):
        digest = xxhash.xxh3_64(seed=layer_seed(header.key, layer))
        left = end - begin
        while left:
            piece = read(min(left, PIECE_BYTES))
            if not piece:
                raise CorruptKVError(f"layer {layer} ends {left} bytes early")
            digest.update(piece)
            left -= len(piece)
            yield piece
        if digest.intdigest() != header.checksums[layer]:
            raise CorruptKVError(f"layer {layer}: the bytes are not those that were put")
