"""KV that cannot be read in place goes through a ring of two layers, and never more."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch

import tiny
from blendrag.fusor import staging
from blendrag.fusor.loader import LayerLoader, LoadedSpan, SpanCorruptError
from blendrag.fusor.staging import HostRing, Transfer
from blendrag.model import ModelAdapter
from blendrag.store.kv import ChunkKV

IDS = tiny.random_ids(40)[0].tolist()
LAYERS = 4


@pytest.fixture(scope="module")
def kv(adapter: ModelAdapter) -> ChunkKV:
    return tiny.kv_between(adapter, IDS, 0, 30)


def buffers() -> list[torch.Tensor]:
    return [torch.full((2, 2, 40, 8), float("nan")) for _ in range(LAYERS)]


def cut(kv: ChunkKV, reader: tiny.Held | None = None, start: int = 3) -> LoadedSpan:
    """Ten tokens of thirty: the reader writes more than there is room for."""
    return LoadedSpan(start, start + 10, reader or tiny.Held(kv), 0, False)


def settles_at(reader: tiny.Held, layers: int) -> bool:
    """Whether it reads so many layers and, within a while, no more."""
    deadline = time.monotonic() + 10
    while len(reader.read) < layers and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(0.05)
    return len(reader.read) == layers


def test_reading_runs_two_layers_ahead_and_waits_for_a_slot(kv: ChunkKV) -> None:
    reader, held = tiny.Held(kv), buffers()
    loader = LayerLoader(held, [[cut(kv, reader)]] * LAYERS)
    loader.start()
    assert settles_at(reader, 2)
    loader.synchronize(0)
    assert settles_at(reader, 3)
    loader.synchronize(1)
    loader.synchronize(3)
    loader.close()
    for layer in range(LAYERS):
        assert torch.equal(held[layer][:, :, 3:13], kv.layers[layer][:, :, :10])
        assert held[layer][:, :, 13:].isnan().all()


def test_a_chunk_read_in_place_needs_no_slot(kv: ChunkKV, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(ring: HostRing, slot: int) -> None:
        raise AssertionError("waits for a slot")

    monkeypatch.setattr(HostRing, "_wait_until_free", refused)
    reader = tiny.Held(kv)
    loader = LayerLoader(buffers(), [[LoadedSpan(0, 30, reader, 0, False)]] * LAYERS)
    loader.start()
    assert settles_at(reader, LAYERS)
    assert loader._ring._slots == []
    loader.close()


def test_two_slots_hold_what_is_staged_of_the_largest_layer(kv: ChunkKV) -> None:
    pair = [cut(kv), cut(kv, start=20)]
    loader = LayerLoader(buffers(), [pair, pair[:1], [], pair])
    loader.start()
    loader.synchronize(3)
    one = 2 * 2 * 30 * 8 * 4
    assert [slot.numel() for slot in loader._ring._slots] == [2 * one] * staging.SLOTS
    loader.close()


@pytest.mark.parametrize("seen", [0, 1, 4])
def test_slots_are_let_go_of_once_loading_is_over_although_the_loader_is_kept(
    kv: ChunkKV, seen: int
) -> None:
    """Of a prompt prefilled with others it is kept until its answer is there."""
    reader = tiny.Held(kv)
    loader = LayerLoader(buffers(), [[cut(kv, reader)]] * LAYERS)
    loader.start()
    for layer in range(seen):
        loader.synchronize(layer)
    assert settles_at(reader, min(LAYERS, 2 + seen))
    slots = [weakref.ref(slot) for slot in loader._ring._slots]
    assert len(slots) == staging.SLOTS
    loader.close()
    assert [slot() for slot in slots] == [None] * staging.SLOTS


def test_layers_without_anything_to_stage_take_no_slot(kv: ChunkKV) -> None:
    held, span = buffers(), cut(kv)
    loader = LayerLoader(held, [[span], [], [], [span]])
    loader.start()
    loader.synchronize(3)
    loader.close()
    assert torch.equal(held[3][:, :, 3:13], kv.layers[3][:, :, :10])
    assert held[1].isnan().all()


@pytest.mark.parametrize("seen", [0, 1])
def test_a_loader_that_waits_for_a_slot_can_be_closed(kv: ChunkKV, seen: int) -> None:
    reader, held = tiny.Held(kv), buffers()
    loader = LayerLoader(held, [[cut(kv, reader)]] * LAYERS)
    loader.start()
    for layer in range(seen):
        loader.synchronize(layer)
    assert settles_at(reader, 2 + seen)
    closer = threading.Thread(target=loader.close)
    closer.start()
    closer.join(10)
    assert not closer.is_alive()
    assert len(reader.read) == 2 + seen
    assert held[seen].isnan().all()  # read, and not copied any more
    loader.close()


def test_a_corrupt_layer_behind_a_full_ring_is_raised_where_it_is_waited_for(kv: ChunkKV) -> None:
    class Corrupt(tiny.Held):
        def read_layer(self, layer: int, out: torch.Tensor) -> None:
            super().read_layer(0 if layer == 3 else layer, out[:, :1] if layer == 3 else out)

    loader = LayerLoader(buffers(), [[cut(kv, Corrupt(kv))]] * LAYERS)
    loader.start()
    for layer in range(2):
        loader.synchronize(layer)
    with pytest.raises(SpanCorruptError, match="another shape"):
        loader.synchronize(3)
    loader.close()


def test_what_one_layer_leaves_in_a_slot_does_not_reach_the_next_target() -> None:
    targets = [torch.zeros(2, 1, n, 4) for n in (6, 2, 4)]
    ring = HostRing([[Transfer(t, (2, 1, 8, 4))] for t in targets])
    ring.start()
    for layer in range(3):
        (slot,) = ring.fill(layer)
        slot.fill_(layer + 1)
        ring.send(layer, [slot])
        ring.receive(layer)
    assert [t.unique().tolist() for t in targets] == [[1.0], [2.0], [3.0]]
