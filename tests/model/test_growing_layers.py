"""Layers that append K and V in place hold what transformers' layers do, which concatenate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import tiny
from blendrag.model.growing_layers import grow_in_place


def cache() -> Any:
    made = DynamicCache()
    made.layers = [DynamicLayer()]
    return made


def fresh(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of different widths, with heads behind tokens as models compute them."""
    k, v = (torch.randn(2, tokens, 3, width).transpose(1, 2) for width in (8, 6))
    return k, v


def crop(layer: Any) -> None:
    layer.keys, layer.values = layer.keys[:, :, :-2], layer.values[:, :, :-2]


def exchange(layer: Any) -> None:
    layer.keys, layer.values = layer.keys.flip(0), layer.values.flip(0)


def give_away(layer: Any) -> None:
    """The buffer is freed, and its address used again."""
    held = [each.clone() for each in (layer.keys, layer.values)]
    layer.keys = layer.values = None
    layer.keys, layer.values = (each.contiguous() for each in held)


@pytest.mark.parametrize("between", [lambda layer: None, crop, exchange, give_away])
def test_it_holds_what_a_stock_layer_does(between: Callable[[Any], None]):
    ours, stock = cache(), cache()
    grow_in_place(ours)
    for step, tokens in enumerate((5, 1, 1, 2, 1, 90, 1, 1)):
        kv = fresh(tokens)
        with torch.inference_mode(step % 2 == 0):
            found, expected = ours.update(*kv, 0), stock.update(*kv, 0)
        assert all(map(torch.equal, found, expected))
        if step in (3, 5):
            between(ours.layers[0])
            between(stock.layers[0])
    assert ours.get_seq_length() == stock.get_seq_length()


def test_a_copy_grows_by_itself():
    one = cache()
    grow_in_place(one)
    one.update(*fresh(5), 0)
    one.update(*fresh(1), 0)
    before = one.layers[0].keys.clone()
    other = copy.deepcopy(one)
    first, second = fresh(1), fresh(1)
    one.update(*first, 0)
    other.update(*second, 0)
    for held, (keys, _) in ((one, first), (other, second)):
        assert torch.equal(held.layers[0].keys, torch.cat((before, keys), 2))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_a_hybrid_models_kv_is_not_copied_for_each_token(name):
    adapter = tiny.adapter(tiny.family(name, initializer_range=0.2))
    assert adapter.composition is not None
    assert adapter.continuation is not None
    ids = tiny.random_ids(12, seed=2)
    composed, continued = adapter.composition.new_cache(), adapter.continuation.new_cache()
    for each, forward in (
        (composed, adapter.composition.forward),
        (continued, adapter.continuation.forward),
    ):
        forward(ids[:, :9], each, 0)
        addresses = []
        for at in (9, 10, 11):
            logits = forward(ids[:, at : at + 1], each, at)
            layers = [each.layers[entry.index] for entry in adapter.composition.with_kv]
            addresses.append([(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in layers])
        assert addresses[0] == addresses[1] == addresses[2]
        stock = tiny.stock(adapter.model, ids)[0, -1:]
        assert tiny.difference(logits, stock) < 1e-4 * float(stock.abs().max())
