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
from blendrag.errors import CorruptKVError
from blendrag.fusor import Fusor
from blendrag.fusor.loader import LoadedSpan, SpanCorruptError
from blendrag.model import ModelAdapter
from fusor.two_chunks import IDS, N, assert_untouched, exact_spans

pytestmark = pytest.mark.alone


@contextmanager
def unchanged(adapter: ModelAdapter) -> Iterator[None]:
    """Logits are the same afterwards; no hook, thread or lock is left."""
    expected = tiny.stock(adapter.model, IDS)
    yield
    assert_untouched(adapter)
    assert not [t for t in threading.enumerate() if t.name == "blendrag-loader"]
    assert torch.equal(tiny.stock(adapter.model, IDS), expected)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(adapter.lock.acquire, timeout=4).result()
        pool.submit(adapter.lock.release).result()


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
    def explode(*_: Any) -> None:
        raise ZeroDivisionError

    spans = exact_spans(adapter)
    broken = getattr(adapter.stack.layers[layer], part).register_forward_hook(explode)
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
