"""``query+hkvd``: half of the budget by the question's attention, half by KV deviation (ours).

``query`` knows what the question needs, but not which of it is stale; ``hkvd`` the reverse. This policy pays
for both: the scout pass, and layer 0 for all candidates with the peek at layer 1.
"""

from __future__ import annotations

import torch

from blendrag.fusor.selection.base import LAST_HALF, LayerView, SelectionPolicy, top


class QueryHKVDPolicy(SelectionPolicy):
    name = "query+hkvd"
    needs_deviation = True
    needs_attention = True
    deep_attention_depth = LAST_HALF

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        if budget >= view.tokens.numel():
            return view.tokens
        assert view.attention is not None
        attended = view.attention.topk(budget - budget // 2, sorted=False).indices
        return top(view.deviation.index_fill(0, attended, torch.inf), view.tokens, budget)
