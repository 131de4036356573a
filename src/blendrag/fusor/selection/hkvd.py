"""``hkvd``: high-KV-deviation tokens by gradual filtering (CacheBlend §4.3, figure 9).

Layer 1 computes the tokens whose K and V at layer 1 deviate most from the stored ones. Each later layer keeps
those that deviated most among the tokens just recomputed. The schedule says how many: r1 > r2 > … with mean
r.
"""

from __future__ import annotations

import torch

from blendrag.fusor.selection.base import LayerView, SelectionPolicy, top


class HKVDPolicy(SelectionPolicy):
    name = "hkvd"
    needs_deviation = True

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        if budget >= view.tokens.numel():
            return view.tokens
        return top(view.deviation, view.tokens, budget)
