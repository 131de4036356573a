"""Tokens at any positions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tiny
from blendrag.model.placement import PlacedModel
from blendrag.model.structure import Decoder
from blendrag.model.windows import Window


def test_tokens_without_gaps_are_prefilled_without_a_mask(monkeypatch):
    """A mask takes memory of the square of the tokens."""
    model = PlacedModel(tiny.adapter(tiny.llama()))
    base, masks = model.decoder.base, []
    stock = base.forward

    def forward(*args, **kwargs):
        masks.append(kwargs["attention_mask"])
        return stock(*args, **kwargs)

    monkeypatch.setattr(base, "forward", forward)
    model.prefill_at(range(3, 9), range(5, 11))
    model.prefill_at(range(3, 9), [5, 6, 7, 9, 10, 11])
    assert masks[0] is None
    assert masks[1] is not None


@pytest.mark.parametrize("types", ["absent", None, []])
def test_a_config_without_types_of_layers_has_its_window_in_all_of_them(types):
    config = SimpleNamespace(sliding_window=8)
    if types != "absent":
        config.layer_types = types
    found = Decoder(torch.nn.Module(), [], config, ["full_attention"])
    assert found.windows == {"sliding_attention": Window(8)}
