"""``hkvd-once``: deviation at one check layer, then a frozen set (CacheBlend's released code).

Compares V alone, at layer 1, and recomputes the same tokens in every layer from there on. The released code
computes the whole check layer; here only its projections are computed, as for ``hkvd``.
"""

from __future__ import annotations

import torch

from blendrag.fusor.selection.base import LayerView, SelectionPolicy, top
from blendrag.fusor.selection.schedule import Schedule


class HKVDOncePolicy(SelectionPolicy):
    name = "hkvd-once"
    needs_deviation = True
    schedule = Schedule("constant")

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        if layer > 1 or budget >= view.tokens.numel():
            return view.tokens
        return top(view.value_deviation, view.tokens, budget)
