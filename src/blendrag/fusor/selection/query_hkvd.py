"""``query+hkvd``: half of the budget by the question's attention, half by KV deviation (ours).

``query`` (ProphetKV, QCFuse) knows what the question needs, but not which of it is stale; ``hkvd``
(CacheBlend §4.3) knows what is stale, but not whether the question needs it. On pretrained models now one
of them is closer to full prefill, now the other. This policy pays for both: the scout pass, and layer 0 for
all candidates with the peek at layer 1.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from blendrag.fusor.selection.base import LayerView, SelectionPolicy, top
from blendrag.fusor.selection.query import QueryPolicy


class QueryHKVDPolicy(SelectionPolicy):
    """Most attention from the question first; the rest of the budget by deviation, filtered gradually."""

    name: ClassVar[str] = "query+hkvd"
    looks = True
    asks = True

    def asked_layers(self, layers: int) -> range:
        return QueryPolicy().asked_layers(layers)

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        if budget >= view.tokens.numel():
            return view.tokens
        assert view.question is not None, "a policy that asks is told"
        asked = view.question.topk(budget - budget // 2, sorted=False).indices
        return top(view.deviation.index_fill(0, asked, torch.inf), view.tokens, budget)
