"""Check the header of a GGUF file against the file before anything is allocated for it.

gguf's reader makes an array of each entry of each list, and transformers makes a module of each layer that a
header names. So a header of some bytes could take any time and memory.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

from blendrag.store import regular_files

#: Limits of a header. Vocabularies have up to 300,000 tokens and a million merges.
MAX_FIELDS, MAX_ENTRIES, MAX_TENSORS = 1 << 14, 1 << 22, 1 << 17
MAX_NAME_BYTES = 1 << 16
#: Layers, heads or experts of a model.
MAX_COUNT = 1 << 14
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
#: Bytes and format of a value, by type.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_VERSIONS = (2, 3)


class _Tensor(NamedTuple):
    name: str
    weights: int
    start: int
    """In bytes, from the beginning of the data."""
    size_bytes: int


def count_weights(file: Path) -> int:
    """Numbers of all tensors. Raises :class:`ValueError` for a header that does not fit the file."""
    with os.fdopen(regular_files.open_regular(file, follow=True), "rb") as opened:
        return _Header(opened).count_weights()


class _Header:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size_bytes = os.fstat(file.fileno()).st_size
        self._order = "<"
        self._entries = 0
        self._counts: dict[str, int] = {}

    def count_weights(self) -> int:
        if self._file.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if not version & 0xFFFF:  # written for the other byte order
            self._order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in _VERSIONS:
            raise ValueError(f"it has version {version}, expected 2 or 3")
        tensors, fields = self._number("Q"), self._number("Q")
        if tensors > MAX_TENSORS or fields > MAX_FIELDS:
            raise ValueError(f"it claims {tensors:,} tensors and {fields:,} fields")
        for _ in range(fields):
            self._read_field()
        found = sorted(self._tensors(tensors), key=lambda tensor: tensor.start)
        self._check_places(found)
        for name, count in self._counts.items():
            most = min(len(found), MAX_COUNT) if name.endswith(".block_count") else MAX_COUNT
            if count > most:
                raise ValueError(f"its {name} is {count:,}, expected at most {most:,}")
        return sum(tensor.weights for tensor in found)

    def _read_field(self) -> None:
        name, kind = self._string(), self._number("I")
        if kind == _STRING:
            self._skip(self._number("Q"))
        elif kind == _ARRAY:
            self._read_array(name)
        else:
            value = self._number(self._format(kind))
            if name.endswith("_count") or name == "general.alignment":
                self._counts[name] = int(value)

    def _read_array(self, name: str) -> None:
        kind, entries = self._number("I"), self._number("Q")
        self._entries += entries
        if self._entries > MAX_ENTRIES:
            raise ValueError(f"its lists have more than {MAX_ENTRIES:,} entries ({name[:80]})")
        if kind == _STRING:
            for _ in range(entries):
                self._skip(self._number("Q"))
        elif name.endswith("_count"):  # one for each layer
            values = [int(self._number(self._format(kind))) for _ in range(entries)]
            self._counts[name] = max(values, default=0)
        else:
            self._skip(entries * struct.calcsize("=" + self._format(kind)))

    def _tensors(self, count: int) -> Iterator[_Tensor]:
        from gguf import GGML_QUANT_SIZES

        sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
        for _ in range(count):
            name, dimensions = self._string(), self._number("I")
            if dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"tensor {name[:80]} has {dimensions:,} dimensions")
            shape = [self._number("Q") for _ in range(dimensions)]
            kind, start = self._number("I"), self._number("Q")
            if kind not in sizes:
                raise ValueError(f"tensor {name[:80]} is of the unknown type {kind}")
            block, block_bytes = sizes[kind]
            yield _Tensor(name[:80], prod(shape), start, -(-prod(shape) // block) * block_bytes)

    def _check_places(self, tensors: list[_Tensor]) -> None:
        """Refuse tensors that overlap, or end after the file."""
        alignment = self._counts.pop("general.alignment", 32)
        if alignment not in {1 << n for n in range(17)}:
            raise ValueError(f"its alignment is {alignment}, expected a small power of two")
        data = -(-self._file.tell() // alignment) * alignment
        end = 0
        for tensor in tensors:
            if tensor.start < end:
                raise ValueError(f"tensor {tensor.name} overlaps another one")
            end = tensor.start + tensor.size_bytes
            if data + end > self._size_bytes:
                raise ValueError(
                    f"tensor {tensor.name} ends at byte {data + end:,}, after the file"
                )

    # -- values ---------------------------------------------------------------------------------

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"it holds a value of the unknown type {kind}")
        return _SCALARS[kind]

    def _number(self, code: str) -> int:
        kind = struct.Struct(self._order + code)
        data = self._file.read(kind.size)
        if len(data) < kind.size:
            raise ValueError("it ends in its header")
        (value,) = kind.unpack(data)
        return value

    def _string(self) -> str:
        size_bytes = self._number("Q")
        if size_bytes > MAX_NAME_BYTES:
            raise ValueError(f"it has a name of {size_bytes:,} bytes")
        return self._file.read(size_bytes).decode("utf-8", "replace")

    def _skip(self, size_bytes: int) -> None:
        if size_bytes > self._size_bytes - self._file.tell():
            raise ValueError("it ends in its header")
        self._file.seek(size_bytes, os.SEEK_CUR)
