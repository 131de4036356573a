"""Many single tokens as a batch give what one after another does."""

from __future__ import annotations

import pytest
import torch

import tiny
from blendrag.model import single_steps
from model.test_composition import IDS, of


@torch.inference_mode()
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_a_block_of_tokens_behind_a_state_gives_what_single_ones_do(monkeypatch, block_tokens):
    monkeypatch.setattr(single_steps, "BLOCK_TOKENS", block_tokens)
    adapter = tiny.adapter(tiny.family("jamba", initializer_range=0.2))
    composition, going = of(adapter), adapter.continuation
    assert going.in_steps
    blocks, singles = composition.new_cache(), composition.new_cache()
    for cache in (blocks, singles):
        composition.forward(IDS[:, :20], cache, 0)
    ours = composition.forward(IDS[:, 20:], blocks, 20, IDS.shape[1] - 20)
    expected = going.forward(IDS[:, 20:], singles, 20, IDS.shape[1] - 20)
    assert tiny.difference(ours, expected) < 1e-4 * float(expected.abs().max())
    for entry in composition.entries:
        if entry.linear is not None:
            sides = (entry.linear.held(cache) for cache in (blocks, singles))
            for one, other in zip(*sides, strict=True):
                assert tiny.difference(one[0], other[0]) < 1e-4 * float(other[0].abs().max())
    assert not any("forward" in vars(module) for module in adapter.model.modules())
