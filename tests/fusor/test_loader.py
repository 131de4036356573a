"""The loader reads layer by layer in its own thread, in place or through a ring of two layers."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from blendrag.errors import CorruptKVError
from blendrag.fusor.loader import LayerLoader, LoadedSpan, SpanCorruptError
from blendrag.fusor.staging import SLOTS, CudaRing, Transfer
from blendrag.model import ModelAdapter
from blendrag.store.kv import ChunkKV
from blendrag.store.tiered import open_store

IDS = tiny.random_ids(40)[0].tolist()
LAYERS = 4


class Gated(tiny.Held):
    """Each layer's read waits for its gate, and is noted in a shared log."""

    def __init__(self, kv: ChunkKV, log: list[tuple[str, int]], name: str = "a") -> None:
        super().__init__(kv)
        self.gates = [threading.Event() for _ in kv.layers]
        self.log, self.name = log, name
        self.threads: set[int] = set()

    def open_all(self) -> None:
        for gate in self.gates:
            gate.set()

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        assert self.gates[layer].wait(60)
        self.threads.add(threading.get_ident())
        self.log.append((self.name, layer))
        super().read_layer(layer, out)


@pytest.fixture(scope="module")
def kv(adapter: ModelAdapter) -> ChunkKV:
    return tiny.kv_between(adapter, IDS, 0, 30)


def buffers() -> list[torch.Tensor]:
    return [torch.full((2, 2, 40, 8), float("nan")) for _ in range(LAYERS)]


def whole(reader: tiny.Held, start: int = 0) -> LoadedSpan:
    """All thirty tokens: read in place."""
    return LoadedSpan(start, start + 30, reader, 0, False)


def cut(reader: tiny.Held, start: int = 3) -> LoadedSpan:
    """Ten tokens of thirty: the reader writes more than there is room for."""
    return LoadedSpan(start, start + 10, reader, 0, False)


@contextmanager
def loading(
    *spans: LoadedSpan, into: list[torch.Tensor] | None = None, start: bool = True
) -> Iterator[LayerLoader]:
    """A loader of these spans in every layer."""
    loader = LayerLoader(into or buffers(), [list(spans)] * LAYERS)
    try:
        if start:
            loader.start()
        yield loader
    finally:
        loader.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert condition()


def settles_at(reader: tiny.Held, layers: int) -> bool:
    """Whether it reads so many layers and, within a while, no more."""
    wait_for(lambda: len(reader.read) >= layers)
    time.sleep(0.03)
    return len(reader.read) == layers


def test_layers_arrive_in_order_and_a_layer_is_ready_before_the_next_is_read(kv):
    log: list[tuple[str, int]] = []
    first, second = Gated(kv, log, "a"), Gated(kv, log, "b")
    held = buffers()
    with loading(LoadedSpan(0, 5, first, 0, False), whole(second, 6), into=held) as loader:
        waiter = threading.Thread(target=loader.synchronize, args=(0,))
        waiter.start()
        waiter.join(0.05)
        assert waiter.is_alive()  # nothing is read yet
        first.gates[0].set()
        second.gates[0].set()
        waiter.join(60)  # returns although layer 1 cannot be read yet
        assert log == [("a", 0), ("b", 0)]
        assert torch.equal(held[0][:, :, 6:36], kv.layers[0])
        assert torch.equal(held[0][:, :, :5], kv.layers[0][:, :, :5])
        assert held[0][:, :, 36:].isnan().all()
        assert held[1].isnan().all()
        first.open_all()
        second.open_all()
        loader.synchronize(3)
    assert log == [(name, layer) for layer in range(LAYERS) for name in "ab"]


def test_a_span_begins_with_the_token_of_the_chunk_that_it_names(kv):
    held = buffers()
    with loading(LoadedSpan(3, 13, tiny.Held(kv), 8, False, first=8), into=held) as loader:
        loader.synchronize(LAYERS - 1)
    for layer, buffer in zip(kv.layers, held, strict=True):
        assert torch.equal(buffer[:, :, 3:13], layer[:, :, 8:18])


def test_layers_are_read_ahead_of_compute_in_another_thread(kv):
    reader = Gated(kv, [])
    reader.open_all()
    with loading(whole(reader), start=False) as loader:
        assert reader.log == []
        loader.start()
        wait_for(lambda: len(reader.log) == LAYERS)  # no caller synchronized
        assert threading.get_ident() not in reader.threads
        assert loader._ring._slots == []  # read in place


def test_only_wanted_layers_are_read_and_need_slots(kv):
    for span_of in (whole, cut):
        reader, held = tiny.Held(kv), buffers()
        span = span_of(reader)
        loader = LayerLoader(held, [[], [span], [], [span]])
        loader.start()
        loader.synchronize(3)
        loader.close()
        assert reader.read == [1, 3]
        expected = kv.layers[3][:, :, : span.tokens]
        assert torch.equal(held[3][:, :, span.start : span.end], expected)
        assert held[2].isnan().all()


@pytest.mark.parametrize("span_of", [whole, cut])
@pytest.mark.parametrize(
    ("error", "raised_as"), [(CorruptKVError, SpanCorruptError), (OSError, OSError)]
)
def test_an_error_of_a_layer_is_raised_to_who_waits_for_it_and_names_its_span(
    kv, span_of, error, raised_as
):
    bad = span_of(tiny.Held(kv, fails_at=2, error=error))
    with loading(LoadedSpan(0, 3, tiny.Held(kv), 0, False), bad) as loader:
        with pytest.raises(raised_as, match="cannot be read") as raised:
            loader.synchronize(2)
        assert getattr(raised.value, "span", bad) is bad


def test_a_loader_that_met_a_corrupt_layer_holds_no_buffers_once_it_is_dropped(kv):
    """Its error's frames hold the loader: until garbage is collected, if it kept the error."""
    gc.collect()
    gc.disable()
    try:
        loader = LayerLoader(buffers(), [[whole(tiny.Held(kv, fails_at=0))]] * LAYERS)
        loader.start()
        with pytest.raises(SpanCorruptError):
            loader.synchronize(0)
        loader.close()
        dropped = weakref.ref(loader)
        del loader
        assert dropped() is None
    finally:
        gc.enable()


def test_close_stops_reading_and_joins_the_thread(kv):
    reader = Gated(kv, [])
    with loading(whole(reader)) as loader:
        threading.Timer(0.05, reader.open_all).start()
        loader.close()
        assert not loader._thread.is_alive()
        assert len(reader.log) <= 1  # the read under way was finished, the rest was not begun
    with loading(start=False):
        pass  # closed before it was started


def test_load_seconds_count_reading_only(kv, monkeypatch):
    class Slow(tiny.Held):
        def read_layer(self, layer: int, out: torch.Tensor) -> None:
            now[0] += 2.0
            super().read_layer(layer, out)

    now = [100.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("blendrag.fusor.loader.time", clock)
    with loading(whole(Slow(kv)), start=False) as loader:
        now[0] += 10.0
        loader.start()
        loader.synchronize(LAYERS - 1)
        now[0] += 10.0
    assert loader.load_s == 2.0 * LAYERS


# -- staging ------------------------------------------------------------------------------------


def test_reading_runs_two_layers_ahead_and_waits_for_a_slot(kv):
    reader, held = tiny.Held(kv), buffers()
    with loading(cut(reader), into=held) as loader:
        assert settles_at(reader, 2)
        loader.synchronize(0)
        assert settles_at(reader, 3)
        loader.synchronize(3)
    for layer in range(LAYERS):
        assert torch.equal(held[layer][:, :, 3:13], kv.layers[layer][:, :, :10])
        assert held[layer][:, :, :3].isnan().all()
        assert held[layer][:, :, 13:].isnan().all()


@pytest.mark.parametrize("seen", [0, 4])
def test_a_closed_loader_stops_waiting_for_slots_and_frees_them(kv, seen):
    """A prompt prefilled with others keeps its loader until its answer is there."""
    reader, held = tiny.Held(kv), buffers()
    with loading(cut(reader), into=held) as loader:
        for layer in range(seen):
            loader.synchronize(layer)
        assert settles_at(reader, min(LAYERS, 2 + seen))
        slots = [weakref.ref(slot) for slot in loader._ring._slots]
        assert [slot().numel() for slot in slots] == [2 * 2 * 30 * 8 * 4] * SLOTS  # type: ignore[union-attr]
        closer = threading.Thread(target=loader.close)
        closer.start()
        closer.join(60)
        assert not closer.is_alive()
        assert [slot() for slot in slots] == [None] * SLOTS
        assert len(reader.read) == min(LAYERS, 2 + seen)
        assert all(layer.isnan().all() for layer in held[seen:])  # read, and no longer copied


# -- what the reading thread runs ---------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Notes every torch operator of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


#: Views and metadata start no kernel.
HARMLESS = ("select", "slice", "view", "alias", "detach", "unsqueeze", "as_strided", "t.default")


@pytest.mark.parametrize("tier", ["disk", "memory"])
def test_the_reading_thread_runs_no_torch_kernel(adapter, kv, tmp_path, tier):
    namespace, key = "a" * 64, "b" * 64
    store = open_store(tmp_path / "s", 1 << 24 if tier == "memory" else 0, 1 << 30)
    try:
        store.put(namespace, key, kv)
        reader = store.open(namespace, key, adapter.layout, 30)
        if tier == "memory":  # what was read from disk is promoted
            assert reader is not None
            for layer in range(LAYERS):
                reader.read_layer(layer, torch.empty(2, 2, 30, 8))
            reader.close()
            store.drain()
            reader = store.open(namespace, key, adapter.layout, 30)
        assert reader is not None
        assert reader.tier == tier
        held = buffers()
        loader = LayerLoader(held, [[LoadedSpan(4, 34, reader, 0, False)]] * LAYERS)
        with Operators() as operators:
            loader._run()
        assert torch.equal(held[2][:, :, 4:34], kv.layers[2])
        assert not [name for name in operators.seen if not any(h in name for h in HARMLESS)]
        with Operators() as control:
            held[0] + 1
        assert control.seen
        reader.close()
    finally:
        store.close()


class FakeStream:
    """A stream whose work is done at once, and which notes what waits for it."""

    waits: list[Any]

    def __init__(self, *_: Any) -> None:
        self.waits = []

    def wait_stream(self, other: Any) -> None:
        self.waits.append(other)

    def wait_event(self, event: Any) -> None:
        assert event.recorded
        self.waits.append(event)


class FakeEvent:
    def __init__(self, blocking: bool) -> None:
        self.recorded = self.waited = False

    def record(self, stream: FakeStream) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded
        self.waited = True

    def query(self) -> bool:
        return self.recorded


def test_the_ring_of_a_gpu_reuses_a_slot_only_after_its_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computing = FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(CudaRing, "pinned", False)
    targets = [torch.zeros(2, 1, 3, 4) for _ in range(4)]
    transfers = [[Transfer(target, (2, 1, 5, 4))] for target in targets[:3]] + [[]]
    ring = CudaRing(transfers, torch.device("cpu"))
    ring.start()
    assert ring._stream.waits == [computing]  # the targets may still be read
    for layer in range(3):
        (filled,) = ring.fill(layer)
        filled.fill_(layer + 1.0)
        ring.send(layer, [filled])
        assert ring.has_arrived(layer)
        ring.receive(layer)
        assert bool((targets[layer] == layer + 1.0).all())
    assert [event.waited for event in ring._arrived] == [True, False, False, False]
    assert len(ring._slots) == SLOTS
    assert ring.fill(3) == []
    ring.send(3, [])
    assert ring.has_arrived(3)
    assert computing.waits == ring._arrived[:3]
    ring.close()
    assert computing.waits[-1] is ring._stream
