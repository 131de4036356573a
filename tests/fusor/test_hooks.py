"""Whatever ends a blended forward, the model is afterwards what it was before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from fusor.two_chunks import IDS, N, assert_untouched, exact_spans

pytestmark = pytest.mark.alone


@contextmanager
def unchanged(adapter: ModelAdapter, engine: BlendEngine | None = None) -> Iterator[None]:
    """Logits are the same afterwards; no hook, thread or lock is left."""
    expected = tiny.stock(adapter.model, IDS)
    yield
    if engine is not None:
        engine.drain()
    assert_untouched(adapter)
    assert not [t for t in threading.enumerate() if t.name == "blendrag-loader"]
    assert torch.equal(tiny.stock(adapter.model, IDS), expected)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(adapter.lock.acquire, timeout=4).result()
        pool.submit(adapter.lock.release).result()


@contextmanager
def exploding(module: torch.nn.Module) -> Iterator[None]:
    """Forwards of ``module`` raise."""

    def explode(*args: Any) -> None:
        raise ZeroDivisionError("in a layer")

    handle = module.register_forward_hook(explode)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("policy", ["hkvd", "query"])
def test_the_model_is_untouched_after_a_fusion(
    adapter: ModelAdapter, policy: str, fast: bool
) -> None:
    with unchanged(adapter):
        tiny.fuse(Fusor(adapter, fast_attention=fast), IDS, exact_spans(adapter), policy, 0.2)


@pytest.mark.parametrize(("layer", "part"), [(0, "mlp"), (1, "self_attn"), (3, "mlp")])
def test_the_model_is_untouched_after_an_exception_in_a_layer(
    adapter: ModelAdapter, fusor: Fusor, layer: int, part: str
) -> None:
    spans = exact_spans(adapter)
    broken = exploding(getattr(adapter.stack.layers[layer], part))
    with unchanged(adapter), broken, pytest.raises(ZeroDivisionError):
        tiny.fuse(fusor, IDS, spans, "hkvd", 0.2)


def test_the_model_is_untouched_after_corrupt_bytes(adapter: ModelAdapter, fusor: Fusor) -> None:
    class Corrupt(tiny.Held):
        def read_layer(self, layer: int, out: torch.Tensor) -> None:
            if layer == 1:
                raise CorruptKVError("flipped bit")
            super().read_layer(layer, out)

    good = exact_spans(adapter)[0]
    bad = LoadedSpan(good.start, good.end, Corrupt(good.reader.kv), 1, False)  # type: ignore[attr-defined]
    with unchanged(adapter), pytest.raises(SpanCorruptError):
        tiny.fuse(fusor, IDS, [bad], "hkvd", 0.2)


def test_a_context_left_without_a_forward_leaves_nothing(
    adapter: ModelAdapter, fusor: Fusor
) -> None:
    request = tiny.request(IDS, exact_spans(adapter))
    cache = fusor.new_cache(N, 4)

    def leave_early() -> None:
        with fusor.fuse(cache, request):
            assert adapter.stack.layers[0]._forward_pre_hooks
            raise KeyError("left early")

    with unchanged(adapter), pytest.raises(KeyError, match="left early"):
        leave_early()
    assert cache.merge is None


@torch.inference_mode()
def test_hooks_serve_exactly_one_forward(adapter: ModelAdapter, fusor: Fusor) -> None:
    request = tiny.request(IDS, exact_spans(adapter), "reuse")
    cache = fusor.new_cache(N, 4)
    token = torch.tensor([[7]])
    with unchanged(adapter):
        with fusor.fuse(cache, request):
            adapter.model(input_ids=IDS, past_key_values=cache, use_cache=True)
            assert_untouched(adapter)  # although the context lasts
            step = adapter.model(input_ids=token, past_key_values=cache, use_cache=True)
        expected = tiny.stock(adapter.model, torch.cat((IDS, token), 1))[0, -1]
        assert tiny.difference(step.logits[0, -1], expected) < 1e-3


def test_an_error_in_another_thread_than_the_fusion_was_begun_in_is_raised(
    adapter: ModelAdapter, fusor: Fusor
) -> None:
    def check() -> None:
        raise InterruptedError

    @torch.inference_mode()
    def forward() -> None:
        adapter.model(input_ids=IDS, past_key_values=cache, use_cache=True)

    request = tiny.request(IDS, exact_spans(adapter), "query", 0.2)
    cache = fusor.new_cache(N, 0)
    with (
        unchanged(adapter),
        ThreadPoolExecutor(1) as pool,
        pytest.raises(InterruptedError),
        fusor.fuse(cache, request, check),
    ):
        pool.submit(forward).result()


# -- through an engine --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    root = tmp_path_factory.mktemp("hooks") / "store"
    with tiny.engine(tiny.llama(eos_token_id=599), root) as made:
        made.adapter.model.generation_config.eos_token_id = None
        made.ingest([tiny.document(1), tiny.document(2)])
        yield made


def prompt_of(engine: BlendEngine) -> str:
    return "Answer from this.\n\n" + "\n\n".join(tiny.chunk_texts(engine, 1)) + "\n\nWhat?"


def test_a_request_after_an_abandoned_stream_is_right(engine: BlendEngine) -> None:
    prompt = prompt_of(engine)
    expected = engine.generate(prompt, Options(mode="blend")).text
    with unchanged(engine.adapter, engine):
        pieces = engine.stream(prompt, Options(max_new_tokens=1500))
        next(pieces)
        pieces.close()
        assert engine.generate(prompt, Options(mode="blend")).text == expected


@pytest.mark.parametrize(("mode", "generate"), [("blend", {}), ("full", {"num_beams": 2})])
def test_cancelling_during_prefill_stops_at_the_next_layer(
    engine: BlendEngine, mode: Mode, generate: dict[str, Any]
) -> None:
    engine.drain()
    entered, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def hold(layer: int) -> None:
        ran.append(layer)
        if layer == 1:
            entered.set()
            assert go_on.wait(10)

    with unchanged(engine.adapter, engine):
        handles = [
            layer.mlp.register_forward_pre_hook(lambda m, a, i=i: hold(i))
            for i, layer in enumerate(engine.adapter.stack.layers)
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


def test_an_error_inside_a_request_reaches_the_caller_and_the_next_one_works(
    engine: BlendEngine,
) -> None:
    with unchanged(engine.adapter, engine):
        with exploding(engine.adapter.stack.layers[2].mlp):
            with pytest.raises(ZeroDivisionError):
                engine.generate(prompt_of(engine))
            with pytest.raises(ZeroDivisionError):
                list(engine.stream(prompt_of(engine)))
        assert engine.generate(prompt_of(engine)).metrics.new_tokens == 6
