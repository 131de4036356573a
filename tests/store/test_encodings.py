"""Encoded KV: errors of at most half a step, and the stored bytes or a miss."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from blendrag.config import KVEncoding
from blendrag.errors import CorruptKVError, InvalidInputError
from blendrag.store.disk import DiskStore
from blendrag.store.encodings import (
    ENCODINGS,
    RELATIVE_ERROR,
    stored_bytes_by_layer,
    stored_chunk_bytes,
)
from blendrag.store.encodings.codec import codec_of, staging_of
from blendrag.store.kv import ChunkKV, KVLayout, LayerShape
from blendrag.store.memory import MemoryStore
from blendrag.store.payload import frame, parse_header
from blendrag.store.tensor_bytes import DTYPES
from blendrag.store.tiered import KVStore
from store.kv_lab import Lab

FLOAT_MAX = torch.finfo(torch.float32).max


def decode(layout: KVLayout, stored: torch.Tensor, out: torch.Tensor) -> None:
    staging = staging_of(layout, out.shape[2])
    assert staging is not None
    staging.read(0, lambda room: ctypes.memmove(room, stored.data_ptr(), stored.numel()), out)


def codec_for(numbers: torch.Tensor) -> tuple[KVLayout, Any]:
    _, heads, _, width = numbers.shape
    dtype = str(numbers.dtype).removeprefix("torch.")
    layout = KVLayout((LayerShape(heads, width),), dtype, "int8")
    return layout, codec_of(layout)


def round_trip(numbers: torch.Tensor) -> torch.Tensor:
    layout, codec = codec_for(numbers)
    out = torch.full_like(numbers, float("nan"))
    decode(layout, codec.encode(0, numbers), out)
    return out


def bound(numbers: torch.Tensor) -> torch.Tensor:
    """The largest error of each number, in float64."""
    wide = numbers.double()
    limit, (keys, values) = torch.zeros_like(wide), wide
    limit[0] = (keys.amax(1, keepdim=True) - keys.amin(1, keepdim=True)) / 508
    limit[1] = values.abs().amax(2, keepdim=True) / 254
    largest = wide.abs().amax(dim=(2, 3), keepdim=True)
    rounded_once = wide.abs() * torch.finfo(numbers.dtype).eps
    # float32's own rounding on the way, and numbers that are nothing to it
    return limit * 1.001 + rounded_once + largest * 2**-21 + 2 * torch.finfo(torch.float32).tiny


numbers32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
usual = st.floats(-30, 30, width=32)


@st.composite
def layers(draw: st.DrawFn) -> torch.Tensor:
    """Small layers of odd shapes with usual or arbitrary numbers."""
    shape = (2, draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.integers(1, 4)))
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    numbers = usual if dtype == torch.float16 else draw(st.sampled_from([usual, numbers32]))
    count = shape[1] * shape[2] * shape[3] * 2
    values = draw(st.lists(numbers, min_size=count, max_size=count))
    made = torch.tensor(values, dtype=torch.float64).view(shape).to(dtype)
    return made.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)


@settings(max_examples=100, deadline=None)
@given(numbers=layers())
def test_every_number_comes_back_within_half_a_step_and_finite(numbers):
    out = round_trip(numbers)
    assert out.isfinite().all()
    assert ((out.double() - numbers.double()).abs() <= bound(numbers)).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 3, 7, 5), (2, 1, 1, 64), (2, 2, 600, 64), (2, 1, 300, 257)])
def test_layers_of_several_blocks_and_of_odd_shapes_come_back_as_well(dtype, shape):
    generator = torch.Generator().manual_seed(3)
    numbers = (3 * torch.randn(shape, generator=generator) + 1).to(DTYPES[dtype])
    out = round_trip(numbers)
    assert ((out.double() - numbers.double()).abs() <= bound(numbers)).all()


@pytest.mark.parametrize("value", [0.0, -0.25, 3.1415927, 1e-30, -FLOAT_MAX, FLOAT_MAX])
def test_equal_numbers_have_no_range_and_come_back(value):
    numbers = torch.full((2, 2, 9, 4), value)
    out = round_trip(numbers)
    torch.testing.assert_close(out, numbers, rtol=2**-20, atol=0)
    assert torch.equal(out[0], numbers[0])  # the middle of a channel without range


def test_an_outlier_costs_only_its_channel_among_keys_and_its_token_among_values():
    numbers = torch.randn((2, 1, 40, 8), generator=torch.Generator().manual_seed(6))
    plain = round_trip(numbers)
    hit = numbers.clone()
    hit[:, 0, 11, 3] = 1e6
    out = round_trip(hit)
    other_channels, other_tokens = [0, 1, 2, 4, 5, 6, 7], [*range(11), *range(12, 40)]
    assert torch.equal(out[0, 0][:, other_channels], plain[0, 0][:, other_channels])
    assert torch.equal(out[1, 0][other_tokens], plain[1, 0][other_tokens])
    assert float((out - hit).abs().max()) <= 1e6 * RELATIVE_ERROR["int8"]
    assert not torch.equal(out[0, 0, other_tokens, 3], plain[0, 0, other_tokens, 3])


def test_no_byte_is_nan_or_beyond_the_last_step_for_numbers_next_to_nothing():
    """Their scale is 0 or mostly rounding error; other readers could see NaN."""
    least = 2.0**-149  # of float32
    for value in (0.0, least, 190 * least, 667 * least, -190 * least):
        numbers = torch.full((2, 1, 3, 4), value)
        numbers[0, 0, 0] = -value
        _, codec = codec_for(numbers)
        coded = codec.encode(0, numbers)[-numbers.numel() :]
        assert int(coded.view(torch.int8).min()) > -128
        assert (round_trip(numbers).sign() * numbers.sign() >= 0).all()


#: Threads of a process while a new thread of its is at work, less those before.
COUNT_THREADS = """
import ctypes, os, threading, time, torch
from blendrag.store.kv import KVLayout, LayerShape
from blendrag.store.encodings.codec import codec_of, staging_of
torch.set_num_threads(2)
layer = torch.zeros(2, 4, 1024, 128, dtype=torch.bfloat16)
def threads():
    return len(os.listdir("/proc/self/task"))
def code():
    layout = KVLayout((LayerShape(4, 128),), "bfloat16", "int8")
    stored = codec_of(layout).encode(0, layer)
    fill = lambda room: ctypes.memmove(room, stored.data_ptr(), stored.numel())
    staging_of(layout, 1024).read(0, fill, layer)
def control():
    layer.add_(1)
def count(work):
    while threads() > before:  # the kernel lets go of a thread a little after it was joined
        time.sleep(0.01)
    seen = []
    thread = threading.Thread(target=lambda: (work(), seen.append(threads() - before)))
    thread.start()
    thread.join()
    return seen[0]
before = threads()
print(count(code), count(control))
"""


@pytest.mark.slow
def test_codecs_start_no_threads_of_torch():
    """They would compete with the threads that compute."""
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, env=env
    )
    assert done.stdout.split() == ["1", "2"], done.stderr


# -- in a store ----------------------------------------------------------------------------------


def layout_of(encoding: str, dtype: str = "bfloat16") -> KVLayout:
    return KVLayout(Lab.layout.layers, dtype, encoding)


def expected(kv: ChunkKV) -> list[torch.Tensor]:
    return [round_trip(layer) for layer in kv.layers]


def test_the_names_are_those_of_the_settings():
    assert get_args(get_args(KVEncoding)[0]) == ENCODINGS


def test_safetensors_reads_the_parts_and_they_multiply_out(make_store):
    store, layout = make_store(), layout_of("int8", "float32")
    kv = Lab.put(store, 1, layout)
    tensors = load_file(Lab.file(store, 1))
    for i, right in enumerate(expected(kv)):
        name = f"l{i:04d}"
        coded = tensors[name].float()
        scales = tensors[f"{name}.key_scales"]
        middles = tensors.get(f"{name}.key_middles", torch.zeros_like(scales))
        keys = coded[0] * scales[:, None] + middles[:, None]
        values = coded[1] * tensors[f"{name}.value_scales"][:, :, None]
        torch.testing.assert_close(torch.stack((keys, values)), right)
    assert len(tensors) == 4 * len(layout.layers)


def test_half_the_bytes_are_stored():
    layout = KVLayout((LayerShape(2, 64),) * 24, "bfloat16", "int8")  # of a 0.5B model
    native = layout.encoded("native")
    assert stored_chunk_bytes(layout, 512) <= 0.54 * stored_chunk_bytes(native, 512)
    assert stored_chunk_bytes(native, 512) == sum(native.layer_bytes(i, 512) for i in range(24))
    assert stored_bytes_by_layer(layout, 512)[0] * 24 == stored_chunk_bytes(layout, 512)
    assert frame(layout, 512).file_bytes - stored_chunk_bytes(layout, 512) <= 3 * 4096


def test_nothing_is_decoded_from_bytes_that_are_not_verified(make_store):
    store, layout = make_store(), layout_of("int8")
    Lab.put(store, 1, layout)
    reader = Lab.open(store, 1, layout)
    Lab.flip(Lab.file(store, 1), -1)
    out = torch.full(layout.layer_shape(2, Lab.tokens), 7.0, dtype=torch.bfloat16)
    with pytest.raises(CorruptKVError):
        reader.read_layer(2, out)
    assert (out == 7).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_rebuilt_index_finds_layers_that_are_decoded_into_the_middle_of_a_prompt(
    make_store, root: Path, dtype
):
    layout = layout_of("int8", dtype)
    kv = Lab.put(make_store(), 1, layout)
    Lab.drop_index(root)
    store = make_store()
    assert (store.stats().entries, store.stats().quarantined) == (1, 0)
    read = Lab.read_into_prompt(Lab.open(store, 1, layout), layout)
    assert all(map(torch.equal, read, expected(kv)))


UNEVEN = (LayerShape(2, 8, 4), LayerShape(2, 8), LayerShape(1, 16, 24))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_of_another_width_than_their_keys_come_back(make_store, root, encoding, dtype):
    """As if K and V had been stored apart; also after the index was rebuilt from the files alone."""
    layout = KVLayout(UNEVEN, dtype, encoding)
    right = []
    for shape, layer in zip(UNEVEN, Lab.put(make_store(), 1, layout).layers, strict=True):
        alone = [torch.stack((part, part)) for part in shape.split(layer)]
        if encoding != "native":
            alone = [round_trip(part) for part in alone]
        right.append(shape.joined(alone[0][0], alone[1][1]))
    Lab.drop_index(root)
    store = make_store()
    assert (store.stats().entries, store.stats().quarantined) == (1, 0)
    read = Lab.read_into_prompt(Lab.open(store, 1, layout), layout)
    assert all(map(torch.equal, read, right))
    other = (LayerShape(2, 4, 8), *UNEVEN[1:])
    assert Lab.open(store, 1, KVLayout(other, dtype, encoding)) is None


@pytest.mark.parametrize("stored", ENCODINGS)
@pytest.mark.parametrize("asked", ENCODINGS)
def test_an_entry_is_never_read_in_another_encoding(make_store, stored, asked):
    for tier in (make_store(), MemoryStore(1 << 20)):
        Lab.put(tier, 1, layout_of(stored))
        assert (Lab.open(tier, 1, layout_of(asked)) is not None) == (stored == asked)


@pytest.mark.parametrize("encoding", ["int8", "native"])
def test_headers_with_another_encoding_than_their_own_are_refused(encoding):
    layout = layout_of(encoding)
    header = frame(layout, Lab.tokens).header(Lab.namespace, Lab.key(1), [1, 2, 3])
    found = parse_header(header)
    assert found is not None
    assert (found.layout, found.tokens) == (layout, Lab.tokens)
    for name in (b'"int4"', b'"fp8"', b'"native"', b"[[[[]]]]", b"null"):
        if encoding == "native":
            changed = header.replace(b'"tokens":', b'"encoding":' + name + b',"tokens":', 1)
        else:
            changed = header.replace(b'"encoding":"int8"', b'"encoding":' + name, 1)
        assert changed != header
        assert parse_header(changed[: len(header)]) is None
        assert parse_header(changed.ljust(len(header))) is None
    with pytest.raises(InvalidInputError, match="'int4'"):
        frame(layout_of("int4"), 1)


def test_memory_keeps_encoded_bytes_and_gives_back_what_disk_does(root: Path):
    layout = layout_of("int8")
    size = stored_chunk_bytes(layout, Lab.tokens)
    store = KVStore(MemoryStore(2 * size), DiskStore(root, 1 << 30))
    for number in range(3):
        right = expected(Lab.put(store, number, layout))
        for tier in ("disk", "memory"):
            reader = Lab.open(store, number, layout)
            assert reader.tier == tier
            assert all(map(torch.equal, Lab.read(reader, layout), right))
            reader.close()
            store.drain()
        assert store.memory.stats().size_bytes == min(number + 1, 2) * size
    memory, disk = store.stats().tiers
    assert memory.read_bytes == 3 * size
    assert disk.read_bytes == 6 * size  # read, and read again to be promoted
    store.close()


def test_a_loaders_thread_decodes_into_what_inference_mode_made(make_store):
    store, layout = make_store(), layout_of("int8")
    right = expected(Lab.put(store, 1, layout))
    reader = Lab.open(store, 1, layout)
    with torch.inference_mode():
        outs = [torch.zeros_like(layer) for layer in right]
        thread = threading.Thread(target=lambda: [reader.read_layer(*o) for o in enumerate(outs)])
        thread.start()
        thread.join()
        assert all(map(torch.equal, outs, right))


def test_threads_that_share_a_reader_do_not_mix_their_bytes():
    mine, theirs = (Lab.kv(number, layout_of("int8")).layers[0] for number in (1, 2))
    layout, codec = codec_for(mine)
    staging = staging_of(layout, Lab.tokens)
    assert staging is not None

    def fill(room: Any, numbers: torch.Tensor) -> None:
        stored = codec.encode(0, numbers)
        ctypes.memmove(room, stored.data_ptr(), stored.numel())

    other = (0, lambda room: fill(room, theirs), torch.empty_like(theirs))
    thread = threading.Thread(target=staging.read, args=other)

    def fill_and_dawdle(room: Any) -> None:
        fill(room, mine)
        thread.start()
        thread.join(0.1)

    out = torch.empty_like(mine)
    staging.read(0, fill_and_dawdle, out)
    thread.join()
    assert torch.equal(out, round_trip(mine))
