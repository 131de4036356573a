"""States that a model keeps in its modules, or in a cache of its own, are kept in the layers of a cache."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import tiny
from blendrag.model.linear_layers import has_states

IDS = tiny.random_ids(12, seed=1)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["recurrent_gemma", "minimax"])
def test_a_prompt_that_is_computed_between_two_tokens_of_another_changes_nothing(name):
    """RecurrentGemma's modules would go on from the states of the prompt in between."""
    adapter = tiny.adapter(tiny.family(name, initializer_range=0.2))
    going, stock = adapter.continuation, tiny.stock(adapter.model, IDS)[0]
    assert going is not None
    cache = going.new_cache()
    going.forward(IDS[:, :11], cache, 0)
    assert sum(has_states(cache, i) for i in range(len(cache.layers))) == 2
    going.forward(tiny.random_ids(9, seed=2), going.new_cache(), 0)
    last = going.forward(IDS[:, 11:], cache, 11)
    assert tiny.difference(last, stock[11:]) < 1e-5 * float(stock.abs().max())


@torch.inference_mode()
def test_a_copy_of_the_model_keeps_its_states_apart():
    adapter = tiny.adapter(tiny.family("recurrent_gemma", initializer_range=0.2))
    copied, config = copy.deepcopy(adapter.model), adapter.model.config
    for weight in adapter.model.parameters():
        weight.zero_()
    cache = DynamicCache(config=config)
    copied(input_ids=IDS, past_key_values=cache, use_cache=True)
    assert float(cache.layers[0].recurrent_states[0].abs().max()) > 0
