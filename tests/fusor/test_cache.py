"""After its blended forward, BlendCache is an ordinary DynamicCache without concatenation."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import tiny
from blendrag.fusor import Fusor
from blendrag.fusor.cache import BlendCache
from blendrag.store.kv import KVLayout, LayerShape

LAYOUT = KVLayout((LayerShape(2, 8), LayerShape(1, 4)), "float32")
IDS = tiny.random_ids(60)
Caches = tuple[BlendCache, DynamicCache]


def filled(tokens: int, capacity: int) -> Caches:
    """Both caches after the same ``tokens`` tokens."""
    caches = BlendCache(LAYOUT, capacity, torch.device("cpu")), DynamicCache()
    feed(caches, tokens, seed=0)
    return caches


def feed(caches: Caches, tokens: int, seed: int, batch: int = 1) -> None:
    """Append the same K and V to both, which must then be equal."""
    generator = torch.Generator().manual_seed(seed)
    for i, shape in enumerate(LAYOUT.layers):
        k, v = (
            torch.randn(batch, shape.kv_heads, tokens, shape.head_dim, generator=generator)
            for _ in range(2)
        )
        ours, theirs = (cache.update(k.clone(), v.clone(), i) for cache in caches)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert caches[0].get_seq_length() == caches[1].get_seq_length()


def test_decoding_in_place_equals_a_dynamic_cache():
    caches = filled(10, 64)
    pointer = caches[0].layers[0].keys.data_ptr()
    for step in range(20):
        feed(caches, 1, seed=step)
    assert caches[0].layers[0].keys.data_ptr() == pointer  # nothing was copied


@pytest.mark.parametrize("capacity", [0, 12])
def test_growth_beyond_capacity_keeps_every_token(capacity):
    caches = filled(10, capacity)
    for step in range(100):
        feed(caches, 1 + step % 3, seed=step)
    ours = caches[0].layers[0]
    assert ours.keys.data_ptr() == ours.buffer.data_ptr()


def test_crop_then_append_equals_a_dynamic_cache():
    caches = filled(20, 64)
    for removed in (8, 2, 18):
        for cache in caches:
            cache.crop(-removed)
        feed(caches, 4, seed=removed)


def test_repeating_for_beams_and_reordering_equals_a_dynamic_cache():
    caches = filled(10, 64)
    for cache in caches:
        cache.batch_repeat_interleave(3)
    feed(caches, 1, seed=1, batch=3)
    for cache in caches:
        cache.reorder_cache(torch.tensor([2, 2, 0]))
    feed(caches, 1, seed=2, batch=3)
    for cache in caches:
        cache.batch_select_indices(torch.tensor([1]))
    feed(caches, 2, seed=3)
    single = filled(10, 64)
    for cache in single:
        cache.reorder_cache(torch.tensor([0]))  # leaves the buffer
    feed(single, 2, seed=1)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gemma3n", "deepseek_v3"])
def test_decoding_over_a_blended_cache_equals_stock(name):
    """Beyond the headroom of a cache made for no new token, and beyond sliding windows."""
    adapter = tiny.adapter(tiny.family(name, initializer_range=0.2))
    span = tiny.span(adapter, IDS, 5, 50, stored_at=1, noise=3.0)
    logits, ours, _ = tiny.fuse(Fusor(adapter), IDS, [span], "full", 1.0)
    out = adapter.model(input_ids=IDS, use_cache=True)
    theirs = out.past_key_values
    mine, other = int(logits[0, -1].argmax()), int(out.logits[0, -1].argmax())
    for _ in range(tiny.WINDOW + 6):
        assert mine == other
        steps = [
            adapter.model(input_ids=torch.tensor([[mine]]), past_key_values=c, use_cache=True)
            for c in (ours, theirs)
        ]
        assert tiny.difference(steps[0].logits, steps[1].logits) < 1e-3
        mine, other = (int(step.logits[0, -1].argmax()) for step in steps)
    assert ours.get_seq_length() == theirs.get_seq_length()
