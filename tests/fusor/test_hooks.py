"""Whatever ends a blended forward, the model is afterwards what it was before."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from blendrag.config import Mode
from blendrag.engine import BlendEngine, Options
from blendrag.errors import CorruptKVError, RequestCancelled
from blendrag.fusor import Fusor
from blendrag.fusor.loader import LoadedSpan, SpanCorruptError
from blendrag.model import ModelAdapter

pytestmark = pytest.mark.alone

IDS = tiny.random_ids(80)


def hooks(adapter: ModelAdapter) -> int:
    """Hooks of any kind on any module of the model."""
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) + len(module._backward_hooks)
        for module in adapter.model.modules()
    )


def loader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "blendrag-loader"]


class State:
    """What must be the same before and after."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self.adapter = adapter
        self.logits = tiny.stock(adapter.model, IDS)
        self.implementation = adapter.model.config._attn_implementation
        assert hooks(adapter) == 0

    def check(self) -> None:
        assert hooks(self.adapter) == 0
        assert self.adapter.model.config._attn_implementation == self.implementation
        assert loader_threads() == []
        assert torch.equal(tiny.stock(self.adapter.model, IDS), self.logits)
        taken = threading.Thread(target=self._take_lock)
        taken.start()
        taken.join(5)
        assert self.free

    def _take_lock(self) -> None:
        self.free = self.adapter.lock.acquire(timeout=4)
        if self.free:
            self.adapter.lock.release()


@pytest.fixture
def state(adapter: ModelAdapter) -> State:
    return State(adapter)


def spans(adapter: ModelAdapter) -> list[LoadedSpan]:
    return [tiny.span(adapter, IDS, 5, 60, stored_at=1)]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("policy", ["hkvd", "reuse", "full", "boundary(4)"])
def test_the_model_is_untouched_after_a_fusion(
    adapter: ModelAdapter, state: State, policy: str, fast: bool
) -> None:
    tiny.fuse(Fusor(adapter, fast_attention=fast), IDS, spans(adapter), policy, 0.2)
    state.check()


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("part", ["mlp", "self_attn"])
def test_the_model_is_untouched_after_an_exception_in_a_layer(
    adapter: ModelAdapter, fusor: Fusor, state: State, layer: int, part: str
) -> None:
    def explode(*args: Any) -> None:
        raise ZeroDivisionError("in a layer")

    module = getattr(adapter.stack.layers[layer], part)
    prepared = spans(adapter)
    handle = module.register_forward_hook(explode)
    try:
        with pytest.raises(ZeroDivisionError):
            tiny.fuse(fusor, IDS, prepared, "hkvd", 0.2)
    finally:
        handle.remove()
    state.check()


@pytest.mark.parametrize("corrupt", [1, 3])
def test_the_model_is_untouched_after_corrupt_bytes(
    adapter: ModelAdapter, fusor: Fusor, state: State, corrupt: int
) -> None:
    class Corrupt(tiny.Held):
        def read_layer(self, layer: int, out: torch.Tensor) -> None:
            if layer == corrupt:
                raise CorruptKVError("flipped bit")
            super().read_layer(layer, out)

    good = spans(adapter)[0]
    bad = LoadedSpan(5, 60, Corrupt(good.reader.kv), 1, False)  # type: ignore[attr-defined]
    with pytest.raises(SpanCorruptError):
        tiny.fuse(fusor, IDS, [bad], "hkvd", 0.2)
    state.check()


def test_a_context_left_without_a_forward_leaves_nothing(
    adapter: ModelAdapter, fusor: Fusor, state: State
) -> None:
    from blendrag.fusor import BlendRequest
    from blendrag.fusor.selection import Schedule, make_policy

    request = BlendRequest(
        80, tuple(spans(adapter)), make_policy("hkvd"), Schedule.parse("constant"), 0.2
    )
    cache = fusor.new_cache(80, 4)

    def leave_early() -> None:
        with fusor.fuse(cache, request):
            assert hooks(adapter) > 0
            raise KeyError("left early")

    with pytest.raises(KeyError, match="left early"):
        leave_early()
    state.check()
    assert cache.merge is None


@torch.inference_mode()
def test_hooks_serve_exactly_one_forward(adapter: ModelAdapter, fusor: Fusor, state: State) -> None:
    from blendrag.fusor import BlendRequest
    from blendrag.fusor.selection import Schedule, make_policy

    request = BlendRequest(
        80, tuple(spans(adapter)), make_policy("reuse"), Schedule.parse("constant"), 0.2
    )
    cache = fusor.new_cache(80, 4)
    with fusor.fuse(cache, request):
        adapter.model(input_ids=IDS, past_key_values=cache, use_cache=True)
        assert hooks(adapter) == 0  # gone although the context lasts
        assert adapter.model.config._attn_implementation == state.implementation
        step = adapter.model(
            input_ids=torch.tensor([[7]]), past_key_values=cache, use_cache=True
        ).logits[0, -1]
    expected = tiny.stock(adapter.model, torch.cat((IDS, torch.tensor([[7]])), 1))[0, -1]
    assert tiny.difference(step, expected) < 1e-3
    state.check()


# -- abandoned streams --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    root: Path = tmp_path_factory.mktemp("hooks") / "store"
    with tiny.engine(tiny.llama(eos_token_id=599), root) as made:
        made.adapter.model.generation_config.eos_token_id = None
        made.ingest([tiny.document(1), tiny.document(2)])
        yield made


def prompt_of(engine: BlendEngine) -> str:
    return "Answer from this.\n\n" + "\n\n".join(tiny.chunk_texts(engine, 1)) + "\n\nWhat?"


def test_a_request_right_after_an_abandoned_stream_is_right(engine: BlendEngine) -> None:
    state = State(engine.adapter)
    prompt = prompt_of(engine)
    expected = engine.generate(prompt, Options(mode="blend")).text
    for close in ("close", "delete", "break"):
        pieces = engine.stream(prompt, Options(max_new_tokens=1500))
        next(pieces)
        if close == "close":
            pieces.close()
        elif close == "break":
            for _ in pieces:
                break
        del pieces
        began = time.perf_counter()
        assert engine.generate(prompt, Options(mode="blend")).text == expected
        assert time.perf_counter() - began < 2.0  # 1500 tokens take longer than that
    engine.drain()
    state.check()


def test_an_abandoned_stream_is_told_so(engine: BlendEngine) -> None:
    pieces = engine.stream(prompt_of(engine), Options(max_new_tokens=1500))
    next(pieces)
    pieces.close()
    with pytest.raises(RequestCancelled):
        _ = pieces.answer
    assert list(pieces) == []  # as any closed generator
    engine.drain()


@pytest.mark.parametrize("generate", [{}, {"num_beams": 2}])
@pytest.mark.parametrize("mode", ["blend", "full"])
def test_cancelling_during_prefill_stops_at_the_next_layer(
    engine: BlendEngine, mode: Mode, generate: dict[str, Any]
) -> None:
    engine.drain()
    state = State(engine.adapter)
    entered, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def hold(module: Any, args: Any, layer: int) -> None:
        ran.append(layer)
        if layer == 1:
            entered.set()
            assert go_on.wait(10)

    layers = engine.adapter.stack.layers
    handles = [
        layer.mlp.register_forward_pre_hook(lambda m, a, i=i: hold(m, a, i))
        for i, layer in enumerate(layers)
    ]
    try:
        pieces = engine.stream(prompt_of(engine), Options(mode=mode, generate=generate))
        assert entered.wait(10)
        pieces.close()
        go_on.set()
        with pytest.raises(RequestCancelled, match="abandoned"):
            _ = pieces.answer
    finally:
        go_on.set()
        for handle in handles:
            handle.remove()
    assert ran == [0, 1]  # layers 2 and 3 were never begun
    engine.drain()
    state.check()


def test_an_error_inside_a_request_reaches_the_caller_and_the_next_one_works(
    engine: BlendEngine,
) -> None:
    state = State(engine.adapter)

    def explode(*args: Any) -> None:
        raise ZeroDivisionError("in a layer")

    handle = engine.adapter.stack.layers[2].mlp.register_forward_hook(explode)
    try:
        with pytest.raises(ZeroDivisionError):
            engine.generate(prompt_of(engine))
        pieces = engine.stream(prompt_of(engine))
        with pytest.raises(ZeroDivisionError):
            list(pieces)
    finally:
        handle.remove()
    assert engine.generate(prompt_of(engine)).metrics.new_tokens == 6
    engine.drain()
    state.check()
