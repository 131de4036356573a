"""BlendCache after its fusion is an ordinary DynamicCache, only without concatenation."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import tiny
from blendrag.fusor import Fusor
from blendrag.fusor.cache import BlendCache
from blendrag.model import ModelAdapter
from blendrag.store.kv import KVLayout, LayerShape

LAYOUT = KVLayout((LayerShape(2, 8), LayerShape(1, 4)), "float32")
IDS = tiny.random_ids(60)


def filled(tokens: int, capacity: int) -> tuple[BlendCache, DynamicCache]:
    """Both caches after the same ``tokens`` tokens."""
    ours, theirs = BlendCache(LAYOUT, capacity, torch.device("cpu")), DynamicCache()
    feed((ours, theirs), tokens, seed=0)
    return ours, theirs


def feed(caches: tuple, tokens: int, seed: int, batch: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, shape in enumerate(LAYOUT.layers):
        k, v = (
            torch.randn(batch, shape.kv_heads, tokens, shape.head_dim, generator=generator)
            for _ in range(2)
        )
        outs = [cache.update(k.clone(), v.clone(), i) for cache in caches]
        for out in outs[1:]:
            assert torch.equal(out[0], outs[0][0])
            assert torch.equal(out[1], outs[0][1])


def assert_equal(ours: BlendCache, theirs: DynamicCache) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)


def test_decoding_in_place_equals_a_dynamic_cache() -> None:
    ours, theirs = filled(10, 64)
    pointer = ours.layers[0].keys.data_ptr()
    for step in range(20):
        feed((ours, theirs), 1, seed=step)
    assert_equal(ours, theirs)
    assert ours.layers[0].keys.data_ptr() == pointer  # nothing was copied


def test_growth_beyond_capacity_keeps_every_token() -> None:
    ours, theirs = filled(10, 12)
    for step in range(200):
        feed((ours, theirs), 1 + step % 3, seed=step)
    assert_equal(ours, theirs)
    assert ours.layers[0].keys.data_ptr() == ours.layers[0].buffer.data_ptr()


def test_an_empty_cache_of_no_capacity_grows() -> None:
    ours, theirs = filled(5, 0)
    feed((ours, theirs), 3, seed=1)
    assert_equal(ours, theirs)


def test_crop_then_append_equals_a_dynamic_cache() -> None:
    ours, theirs = filled(20, 64)
    for removed in (8, 2, 18):
        for cache in (ours, theirs):
            cache.crop(-removed)
        feed((ours, theirs), 4, seed=removed)
        assert_equal(ours, theirs)


def test_repeating_for_beams_and_reordering_equals_a_dynamic_cache() -> None:
    ours, theirs = filled(10, 64)
    for cache in (ours, theirs):
        cache.batch_repeat_interleave(3)
    feed((ours, theirs), 1, seed=1, batch=3)
    for cache in (ours, theirs):
        cache.reorder_cache(torch.tensor([2, 2, 0]))
    feed((ours, theirs), 1, seed=2, batch=3)
    for cache in (ours, theirs):
        cache.batch_select_indices(torch.tensor([1]))
    feed((ours, theirs), 2, seed=3)
    assert_equal(ours, theirs)


def test_reordering_a_single_sequence_leaves_the_buffer_and_stays_right() -> None:
    ours, theirs = filled(10, 64)
    for cache in (ours, theirs):
        cache.reorder_cache(torch.tensor([0]))
    feed((ours, theirs), 2, seed=1)
    assert_equal(ours, theirs)


@torch.inference_mode()
def test_decoding_over_a_blended_cache_equals_stock(adapter: ModelAdapter, fusor: Fusor) -> None:
    span = tiny.span(adapter, IDS, 5, 50, stored_at=1, noise=3.0)
    logits, ours, _ = tiny.fuse(fusor, IDS, [span], "full", 1.0)
    out = adapter.model(input_ids=IDS, use_cache=True)
    theirs = out.past_key_values
    mine, other = int(logits[0, -1].argmax()), int(out.logits[0, -1].argmax())
    for _ in range(40):  # beyond the headroom of a cache made for no new token
        assert mine == other
        steps = [
            adapter.model(input_ids=torch.tensor([[mine]]), past_key_values=c, use_cache=True)
            for c in (ours, theirs)
        ]
        assert tiny.difference(steps[0].logits, steps[1].logits) < 1e-3
        mine, other = (int(step.logits[0, -1].argmax()) for step in steps)
    assert ours.get_seq_length() == theirs.get_seq_length() == 100


@torch.inference_mode()
@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_decoding_slides_the_window_as_stock_does(name: str) -> None:
    adapter = tiny.adapter(tiny.family(name, initializer_range=0.2))
    span = tiny.span(adapter, IDS, 5, 50, stored_at=1)
    logits, ours, _ = tiny.fuse(Fusor(adapter), IDS, [span], "reuse")
    out = adapter.model(input_ids=IDS, use_cache=True)
    theirs = out.past_key_values
    token = int(out.logits[0, -1].argmax())
    assert int(logits[0, -1].argmax()) == token
    for _ in range(tiny.WINDOW + 4):
        steps = [
            adapter.model(input_ids=torch.tensor([[token]]), past_key_values=c, use_cache=True)
            for c in (ours, theirs)
        ]
        assert tiny.difference(steps[0].logits, steps[1].logits) < 1e-3
        token = int(steps[1].logits[0, -1].argmax())
