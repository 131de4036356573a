import json
import struct

import pytest
import torch
from safetensors.torch import load_file

from blendrag.errors import InvalidInputError
from blendrag.store.kv import KVLayout, LayerShape
from blendrag.store.payload import (
    ALIGNMENT_BYTES,
    frame,
    layer_checksum,
    layer_seed,
    parse_header,
)


def header_of(lab, number=1):
    return frame(lab.layout, lab.tokens).header(lab.namespace, lab.key(number), [1, 2, 3])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_stock_safetensors_reads_a_payload(lab, make_store, dtype):
    store = make_store()
    layout = KVLayout(lab.layout.layers, dtype)
    kv = lab.kv(3, layout)
    store.put(lab.namespace, lab.key(3), kv)
    tensors = load_file(lab.file(store, 3))
    assert list(tensors) == ["l0000", "l0001", "l0002"]
    assert all(map(torch.equal, tensors.values(), kv.layers))


def test_data_starts_at_a_page(lab):
    assert frame(lab.layout, lab.tokens).header_bytes % ALIGNMENT_BYTES == 0
    assert len(header_of(lab)) == frame(lab.layout, lab.tokens).header_bytes


def test_metadata_names_key_namespace_tokens_and_dtype(lab):
    header = header_of(lab)
    metadata = json.loads(header[8:])["__metadata__"]
    assert metadata["key"] == lab.key(1)
    assert metadata["namespace"] == lab.namespace
    assert metadata["tokens"] == str(lab.tokens)
    assert metadata["dtype"] == "float32"
    assert metadata["blendrag_format"] == "1"
    assert metadata["checksums"] == "".join(f"{i:016x}" for i in (1, 2, 3))


def test_checksums_depend_on_key_and_layer(lab):
    data = b"x" * 1000
    sums = {layer_checksum(lab.key(k), layer, data) for k in range(4) for layer in range(4)}
    assert len(sums) == 16
    assert layer_seed("f" * 64, 1) < 1 << 64


def test_a_header_of_another_layout_tokens_key_or_namespace_is_refused(lab):
    header = header_of(lab)
    expected = frame(lab.layout, lab.tokens)
    assert expected.checksums(header, lab.namespace, lab.key(1)) == [1, 2, 3]
    assert expected.checksums(header, lab.namespace, lab.key(2)) is None
    assert expected.checksums(header, lab.key(1), lab.key(1)) is None
    assert frame(lab.layout, 25).checksums(header, lab.namespace, lab.key(1)) is None
    other = KVLayout(lab.layout.layers[:2], "float32")
    assert frame(other, lab.tokens).checksums(header, lab.namespace, lab.key(1)) is None


def test_every_changed_header_byte_outside_the_checksums_is_refused(lab):
    header = header_of(lab)
    expected = frame(lab.layout, lab.tokens)
    start = len(expected.before_checksums)
    for position in range(0, len(header), 7):
        if start <= position < start + 48:
            continue
        changed = bytearray(header)
        changed[position] ^= 0x11
        assert expected.checksums(bytes(changed), lab.namespace, lab.key(1)) is None
        assert parse_header(bytes(changed)) is None


@pytest.mark.parametrize("digits", [b"+00000000000001f", b"0_00000000000001", b"0X0000000000001f"])
def test_checksums_have_one_spelling(lab, digits):
    expected = frame(lab.layout, lab.tokens)
    start = len(expected.before_checksums)
    header = header_of(lab)
    changed = header[:start] + digits + header[start + 16 :]
    assert expected.checksums(changed, lab.namespace, lab.key(1)) is None


def test_describe_returns_what_was_written(lab):
    found = parse_header(header_of(lab))
    assert (found.namespace, found.key) == (lab.namespace, lab.key(1))
    assert (found.layout, found.tokens) == (lab.layout, lab.tokens)
    assert found.file_bytes == lab.entry_bytes


def test_describe_refuses_hostile_headers(lab):
    def framed(text: bytes) -> bytes:
        return struct.pack("<Q", len(text)) + text

    good = header_of(lab)
    deep = b'{"__metadata__":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    duplicate = good[8:].replace(b'{"__metadata__"', b'{"l0000":1,"__metadata__"', 1)
    huge = good[8:].replace(b'"tokens":"24"', b'"tokens":"9999999999999999999"', 1)
    endless = good[8:].replace(b'"tokens":"24"', b'"tokens":1e999', 1)
    assert endless != good[8:]
    odd = (b"", b"{}", b"[]", b"null", b"\xff\xfe", b" " * (1 << 20))
    for text in (deep, duplicate, huge, endless, *odd):
        assert parse_header(framed(text)) is None
    assert parse_header(good[:-1]) is None
    assert parse_header(b"") is None


def test_a_layout_that_cannot_be_stored_is_refused(lab):
    with pytest.raises(InvalidInputError, match="0 tokens"):
        frame(lab.layout, 0)
    with pytest.raises(InvalidInputError, match="too many layers"):
        frame(KVLayout((LayerShape(1, 1),) * 20_000, "float32"), 1)
