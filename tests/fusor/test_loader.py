"""The loader reads layer by layer in its own thread, ahead of compute, and stops when told."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from blendrag.errors import CorruptKVError
from blendrag.fusor.loader import LayerLoader, LoadedSpan, SpanCorruptError
from blendrag.model import ModelAdapter
from blendrag.store import open_store
from blendrag.store.kv import ChunkKV

IDS = tiny.random_ids(40)[0].tolist()
LAYERS = 4


class Gated(tiny.Held):
    """Each layer's read waits for its gate, and is noted in a shared log."""

    def __init__(self, kv: ChunkKV, log: list[tuple[str, int]], name: str) -> None:
        super().__init__(kv)
        self.gates = [threading.Event() for _ in kv.layers]
        self.log, self.name = log, name
        self.threads: set[int] = set()

    def open_all(self) -> None:
        for gate in self.gates:
            gate.set()

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        assert self.gates[layer].wait(10)
        self.threads.add(threading.get_ident())
        self.log.append((self.name, layer))
        super().read_layer(layer, out)


@pytest.fixture(scope="module")
def kv(adapter: ModelAdapter) -> ChunkKV:
    return tiny.kv_between(adapter, IDS, 0, 30)


def buffers(n: int = 40) -> list[torch.Tensor]:
    return [torch.full((2, 2, n, 8), float("nan")) for _ in range(LAYERS)]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert condition()


def test_layers_arrive_in_order_and_a_layer_is_ready_before_the_next_is_read(kv: ChunkKV) -> None:
    log: list[tuple[str, int]] = []
    first, second = Gated(kv, log, "a"), Gated(kv, log, "b")
    spans = [LoadedSpan(0, 5, first, 0, False), LoadedSpan(6, 36, second, 0, False)]
    held = buffers()
    loader = LayerLoader(held, [spans] * LAYERS)
    loader.start()
    for gate in (first.gates[0], second.gates[0]):
        gate.set()
    loader.synchronize(0)  # returns although layer 1 cannot be read yet
    assert log == [("a", 0), ("b", 0)]
    assert torch.equal(held[0][:, :, 6:36], kv.layers[0])
    assert torch.equal(held[0][:, :, :5], kv.layers[0][:, :, :5])
    assert held[0][:, :, 36:].isnan().all()
    assert held[1].isnan().all()
    for reader in (first, second):
        reader.open_all()
    loader.synchronize(3)
    assert log == [(name, layer) for layer in range(LAYERS) for name in "ab"]
    loader.close()


def test_layers_are_read_ahead_of_compute(kv: ChunkKV) -> None:
    reader = Gated(kv, [], "a")
    reader.open_all()
    loader = LayerLoader(buffers(), [[LoadedSpan(0, 30, reader, 0, False)]] * LAYERS)
    assert reader.log == []  # nothing before start
    loader.start()
    wait_for(lambda: len(reader.log) == LAYERS)  # nobody synchronized
    assert threading.get_ident() not in reader.threads
    loader.close()


def test_synchronize_waits_until_the_layer_is_in_place(kv: ChunkKV) -> None:
    reader = Gated(kv, [], "a")
    loader = LayerLoader(buffers(), [[LoadedSpan(0, 30, reader, 0, False)]] * LAYERS)
    loader.start()
    returned = threading.Event()
    waiter = threading.Thread(target=lambda: (loader.synchronize(0), returned.set()))
    waiter.start()
    assert not returned.wait(0.05)
    reader.gates[0].set()
    assert returned.wait(10)
    waiter.join()
    reader.open_all()
    loader.close()


def test_only_wanted_layers_are_read(kv: ChunkKV) -> None:
    reader = tiny.Held(kv)
    span = LoadedSpan(0, 30, reader, 0, False)
    loader = LayerLoader(buffers(), [[], [span], [], [span]])
    loader.start()
    loader.synchronize(3)
    loader.close()
    assert reader.read == [1, 3]


def test_a_chunk_cut_off_at_its_tail_lends_its_head_and_nothing_behind_it(kv: ChunkKV) -> None:
    held = buffers(20)
    loader = LayerLoader(held, [[LoadedSpan(3, 13, tiny.Held(kv), 0, False)]] * LAYERS)
    loader.start()
    for layer in range(LAYERS):
        loader.synchronize(layer)
        assert torch.equal(held[layer][:, :, 3:13], kv.layers[layer][:, :, :10])
        assert held[layer][:, :, :3].isnan().all()
        assert held[layer][:, :, 13:].isnan().all()
    loader.close()


def test_a_corrupt_layer_is_raised_where_it_is_waited_for_and_names_its_span(kv: ChunkKV) -> None:
    class Corrupt(tiny.Held):
        def read_layer(self, layer: int, out: torch.Tensor) -> None:
            if layer == 2:
                raise CorruptKVError("layer 2 has another checksum")
            super().read_layer(layer, out)

    good = LoadedSpan(0, 5, tiny.Held(kv), 0, False)
    bad = LoadedSpan(5, 35, Corrupt(kv), 0, False)
    loader = LayerLoader(buffers(), [[good, bad]] * LAYERS)
    loader.start()
    with pytest.raises(SpanCorruptError, match="another checksum") as raised:
        loader.synchronize(2)
    assert raised.value.span is bad
    loader.close()


def test_a_loader_that_met_a_corrupt_layer_holds_no_buffers_once_it_is_dropped(kv: ChunkKV) -> None:
    """Its error's frames hold the loader: until garbage is collected, were it to keep the error."""

    class Corrupt(tiny.Held):
        def read_layer(self, layer: int, out: torch.Tensor) -> None:
            raise CorruptKVError("another checksum")

    gc.collect()
    gc.disable()
    try:
        loader = LayerLoader(buffers(), [[LoadedSpan(0, 30, Corrupt(kv), 0, False)]] * LAYERS)
        loader.start()
        with pytest.raises(SpanCorruptError):
            loader.synchronize(0)
        loader.close()
        dropped = weakref.ref(loader)
        del loader
        assert dropped() is None
    finally:
        gc.enable()


def test_an_unexpected_error_in_the_reading_thread_surfaces_and_never_hangs(kv: ChunkKV) -> None:
    class Broken(tiny.Held):
        def read_layer(self, layer: int, out: torch.Tensor) -> None:
            raise OSError("device gone")

    loader = LayerLoader(buffers(), [[LoadedSpan(0, 30, Broken(kv), 0, False)]] * LAYERS)
    loader.start()
    with pytest.raises(OSError, match="device gone"):
        loader.synchronize(3)
    loader.close()


def test_close_stops_reading_and_joins_the_thread(kv: ChunkKV) -> None:
    reader = Gated(kv, [], "a")
    loader = LayerLoader(buffers(), [[LoadedSpan(0, 30, reader, 0, False)]] * LAYERS)
    loader.start()
    threading.Timer(0.05, reader.open_all).start()
    loader.close()
    assert not loader._thread.is_alive()
    assert len(reader.log) <= 1  # the read under way was finished, the rest was not begun
    loader.close()


def test_close_before_start_is_no_error(kv: ChunkKV) -> None:
    LayerLoader(buffers(), [[]] * LAYERS).close()


def test_load_seconds_count_reading_only(kv: ChunkKV) -> None:
    class Slow(tiny.Held):
        def read_layer(self, layer: int, out: torch.Tensor) -> None:
            time.sleep(0.02)
            super().read_layer(layer, out)

    loader = LayerLoader(buffers(), [[LoadedSpan(0, 30, Slow(kv), 0, False)]] * LAYERS)
    time.sleep(0.2)
    loader.start()
    loader.synchronize(LAYERS - 1)
    loader.close()
    assert 0.08 <= loader.load_s < 0.2


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
def test_the_reading_thread_runs_no_torch_kernel(
    adapter: ModelAdapter, kv: ChunkKV, tmp_path: Any, tier: str
) -> None:
    namespace, key = "a" * 64, "b" * 64
    with_ram = 1 << 24 if tier == "memory" else 0
    store = open_store(tmp_path / "s", with_ram, 1 << 30)
    try:
        store.put(namespace, key, kv)
        for _ in range(100):
            reader = store.open(namespace, key, adapter.layout, 30)
            assert reader is not None
            if reader.tier == tier:
                break
            for layer in range(LAYERS):  # what was read from disk is promoted
                reader.read_layer(layer, torch.empty(2, 2, 30, 8))
            reader.close()
            time.sleep(0.02)
        assert reader.tier == tier
        held = buffers()
        loader = LayerLoader(held, [[LoadedSpan(4, 34, reader, 0, False)]] * LAYERS)
        with Operators() as operators:
            loader._run()
        assert torch.equal(held[2][:, :, 4:34], kv.layers[2])
        kernels = [name for name in operators.seen if not any(h in name for h in HARMLESS)]
        assert kernels == []
        with Operators() as control:
            held[0] + 1
        assert control.seen  # the notice works
        reader.close()
    finally:
        store.close()
