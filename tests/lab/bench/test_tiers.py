"""Tiers to measure: where KV is read from, and a wrapper that is as slow as it says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny
from blendrag.errors import InvalidInputError
from blendrag.lab.bench import tiers
from blendrag.lab.bench.geometry import bench_adapter
from blendrag.lab.bench.tiers import (
    MIN_BYTES_PER_S,
    Throttle,
    ThrottledStore,
    TierStore,
    parse_tier,
    tier_store,
)
from blendrag.lab.bench.ttft import TtftBench
from blendrag.lab.bench.workload import Workload
from blendrag.model import ModelAdapter
from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.kv import ChunkKV

pytestmark = pytest.mark.alone

NAMESPACE, KEY = "a" * 64, "b" * 64
LAYERS, TOKENS = 4, 30


@pytest.fixture(scope="module")
def kv() -> ChunkKV:
    made: ModelAdapter = tiny.adapter(tiny.llama())
    return made.encode((), tiny.random_ids(TOKENS)[0].tolist())


@pytest.fixture
def store(tmp_path: Path, kv: ChunkKV) -> Iterator[TierStore]:
    with tier_store(parse_tier("disk")) as there:
        there.store.put(NAMESPACE, KEY, kv)
        yield there


def read(store: object, kv: ChunkKV) -> list[torch.Tensor]:
    """Every layer, through whatever ``store`` opens."""
    reader = store.open(NAMESPACE, KEY, kv.layout, TOKENS)  # type: ignore[attr-defined]
    layers = [torch.empty_like(layer) for layer in kv.layers]
    for i, layer in enumerate(layers):
        reader.read_layer(i, layer)
    reader.close()
    return layers


# -- a throttled store -------------------------------------------------------------------------


def test_a_throttled_read_delivers_the_same_bytes_no_sooner_than_its_device(
    store: TierStore, kv: ChunkKV
) -> None:
    size = stored_chunk_bytes(kv.layout, TOKENS)
    slow = ThrottledStore(store.store, Throttle(size / 0.2), "slow")
    began = time.perf_counter()
    layers = read(slow, kv)
    assert time.perf_counter() - began >= 0.199
    assert all(torch.equal(a, b) for a, b in zip(layers, kv.layers, strict=True))
    reader = slow.open(NAMESPACE, KEY, kv.layout, TOKENS)
    assert reader is not None
    assert reader.tier == "slow"
    reader.close()


def test_readers_share_the_device(store: TierStore, kv: ChunkKV) -> None:
    """Two layers asked for at once come one after the other."""
    device = Throttle(1000.0)
    first, second = device.begin(100), device.begin(100)
    assert second - first == pytest.approx(0.1)


def test_a_device_that_stood_idle_owes_nothing(store: TierStore) -> None:
    device = Throttle(1e6)
    device.begin(1)
    time.sleep(0.01)
    assert device.begin(1) - time.perf_counter() <= 1e-6


def test_fewer_stored_bytes_take_less_of_the_device(store: TierStore, kv: ChunkKV) -> None:
    asked: list[int] = []

    class Counting(Throttle):
        def begin(self, size_bytes: int) -> float:
            asked.append(size_bytes)
            return super().begin(size_bytes)

    small = replace(kv, layout=kv.layout.encoded("int8"))
    store.store.put(NAMESPACE, "c" * 64, small)
    for key, layout in ((KEY, kv.layout), ("c" * 64, small.layout)):
        reader = ThrottledStore(store.store, Counting(1e9)).open(NAMESPACE, key, layout, TOKENS)
        assert reader is not None
        reader.read_layer(0, torch.empty_like(kv.layers[0]))
        reader.close()
    native, encoded = asked
    assert encoded < 0.6 * native


def test_what_is_not_there_is_not_opened(store: TierStore, kv: ChunkKV) -> None:
    assert (
        ThrottledStore(store.store, Throttle(1e9)).open(NAMESPACE, "d" * 64, kv.layout, 1) is None
    )


# -- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "bytes_per_s"), [("0.5GB/s", 5e8), ("200 MB/s", 2e8)])
def test_a_throughput_is_a_tier(text: str, bytes_per_s: float) -> None:
    tier = parse_tier(text)
    assert tier.bytes_per_s == bytes_per_s
    assert tier.name == tier.profiled == text


@pytest.mark.parametrize("text", ["", "floppy", "0GB/s", "-1GB/s", "1e999GB/s", "nan"])
def test_what_is_no_tier_is_one_sentence(text: str) -> None:
    with pytest.raises(InvalidInputError, match="is none of memory, disk, cold") as caught:
        parse_tier(text)
    assert tiny.one_sentence(str(caught.value))


@pytest.mark.parametrize("text", ["1e-300B/s", "1B/s", "0.9KB/s"])
def test_a_disk_from_which_a_read_takes_hours_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(
        InvalidInputError, match="expected a throughput of 1 KB/s or more"
    ) as caught:
        parse_tier(text)
    assert tiny.one_sentence(str(caught.value))
    assert parse_tier("1KB/s").bytes_per_s == MIN_BYTES_PER_S


# -- where a bench reads from ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "from_"), [("memory", "memory"), ("disk", "disk"), ("9GB/s", "9GB/s")]
)
def test_a_bench_reads_from_the_tier_it_names(name: str, from_: str) -> None:
    adapter = bench_adapter("tiny", None, "float32", "cpu")
    with tier_store(parse_tier(name)) as there, torch.inference_mode():
        bench = TtftBench(adapter, Workload(2, 32, 8, 0.15), there.store)
        token = bench.blend()
        there.settle()
        there.prepare()
        with bench.opened() as load:
            assert {span.reader.tier for span in load.spans} == {from_}
        assert bench.blend() == token


def test_a_cold_disk_is_asked_for_its_pages_before_every_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped: list[int] = []
    monkeypatch.setattr(tiers, "drop", lambda files: dropped.append(len(list(files))))
    monkeypatch.setattr(tiers, "cached_share", lambda files: 0.0)
    adapter = bench_adapter("tiny", None, "float32", "cpu")
    with tier_store(parse_tier("cold")) as there, torch.inference_mode():
        TtftBench(adapter, Workload(2, 32, 8, 0.15), there.store)
        there.prepare()
    assert dropped == [2]


def test_a_page_cache_that_keeps_its_pages_is_no_cold_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "cached_share", lambda files: 0.5)
    with (
        tier_store(parse_tier("cold")) as there,
        pytest.raises(InvalidInputError, match="50% of the files stay in the page cache"),
    ):
        there.prepare()
