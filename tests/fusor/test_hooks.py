"""Whatever ends a blended forward, the model is afterwards what it was before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
from blendrag.fusor import Fusor
from blendrag.fusor.loader import SpanCorruptError
from blendrag.model import ModelAdapter
from fusor.two_chunks import IDS, LAYERS, N, assert_untouched, exact_spans
from loops import BLOCKED_S


@contextmanager
def unchanged(adapter: ModelAdapter) -> Iterator[None]:
    """Logits are the same afterwards; no hook, thread or lock is left."""
    expected = tiny.stock(adapter.model, IDS)
    yield
    assert_untouched(adapter)
    assert not [t for t in threading.enumerate() if t.name == "blendrag-loader"]
    assert torch.equal(tiny.stock(adapter.model, IDS), expected)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(adapter.lock.acquire, timeout=BLOCKED_S).result()
        pool.submit(adapter.lock.release).result()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("policy", ["hkvd", "query"])
def test_the_model_is_untouched_after_a_fusion(adapter, policy, fast):
    with unchanged(adapter):
        tiny.fuse(Fusor(adapter, fast_attention=fast), IDS, exact_spans(adapter), policy, 0.2)


@pytest.mark.parametrize(("layer", "part"), [(0, "mlp"), (1, "self_attn"), (3, "mlp")])
def test_the_model_is_untouched_after_an_exception_in_a_layer(fusor, layer, part):
    def explode(*_: Any) -> None:
        raise ZeroDivisionError

    spans = exact_spans(fusor.adapter)
    module = getattr(fusor.adapter.stack.layers[layer], part)
    with (
        unchanged(fusor.adapter),
        module.register_forward_hook(explode),
        pytest.raises(ZeroDivisionError),
    ):
        tiny.fuse(fusor, IDS, spans, "hkvd", 0.2)


def test_the_model_is_untouched_after_corrupt_bytes(fusor):
    good = exact_spans(fusor.adapter)[0]
    bad = replace(good, reader=tiny.Held(good.reader.kv, fails_at=1))  # type: ignore[attr-defined]
    with unchanged(fusor.adapter), pytest.raises(SpanCorruptError):
        tiny.fuse(fusor, IDS, [bad], "hkvd", 0.2)


def test_a_context_left_without_a_forward_leaves_nothing(fusor):
    request = tiny.request(IDS, exact_spans(fusor.adapter))
    cache = fusor.new_cache(N, 4)

    def leave_early() -> None:
        with fusor.fuse(cache, request):
            assert fusor.adapter.stack.layers[0]._forward_pre_hooks
            raise KeyError("left early")

    with unchanged(fusor.adapter), pytest.raises(KeyError, match="left early"):
        leave_early()
    assert cache.merge is None


@torch.inference_mode()
def test_hooks_serve_exactly_one_forward(fusor):
    request = tiny.request(IDS, exact_spans(fusor.adapter), "reuse")
    cache = fusor.new_cache(N, 4)
    token = torch.tensor([[7]])
    with unchanged(fusor.adapter):
        with fusor.fuse(cache, request):
            fusor.adapter.model(input_ids=IDS, past_key_values=cache, use_cache=True)
            assert_untouched(fusor.adapter)  # although the context lasts
            step = fusor.adapter.model(input_ids=token, past_key_values=cache, use_cache=True)
        expected = tiny.stock(fusor.adapter.model, torch.cat((IDS, token), 1))[0, -1]
        assert tiny.difference(step.logits[0, -1], expected) < 1e-3


@pytest.mark.parametrize("after", [0, LAYERS + 1], ids=("scout", "later"))
def test_a_forward_abandoned_in_another_thread_than_its_fusion_began_in_leaves_nothing(
    fusor, after
):
    calls = iter(range(100))

    def check() -> None:
        if next(calls) == after:
            raise InterruptedError

    @torch.inference_mode()
    def forward() -> None:
        fusor.adapter.model(input_ids=IDS, past_key_values=cache, use_cache=True)

    request = tiny.request(IDS, exact_spans(fusor.adapter), "query", 0.2)
    cache = fusor.new_cache(N, 0)
    with (
        unchanged(fusor.adapter),
        ThreadPoolExecutor(1) as pool,
        pytest.raises(InterruptedError),
        fusor.fuse(cache, request, check),
    ):
        pool.submit(forward).result()
