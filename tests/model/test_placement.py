"""Tokens at any positions."""

from __future__ import annotations

import tiny
from blendrag.model.placement import PlacedModel


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
