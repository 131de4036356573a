"""``query``: the tokens that the question attends to (ProphetKV, QCFuse).

A scout pass runs the fresh tokens over stored KV first. A token's worth is the attention that the tokens
after the last chunk pay to it, summed over heads and layers. Unlike a deviation in the first layers, this
finds tokens whose KV goes wrong only in later ones. Layer 0 is computed for the chosen tokens alone.

In deep models only the middle third of the layers is summed, and the scout pass ends there: it costs two
thirds of a forward, and the last third of the stored KV loads during recompute. In the embedded model of 12
layers the last layers matter most.
"""

from __future__ import annotations

import torch

from blendrag.fusor.selection.base import MIDDLE_THIRD, LayerView, SelectionPolicy


class QueryPolicy(SelectionPolicy):
    name = "query"
    needs_attention = True
    deep_attention_depth = MIDDLE_THIRD
    ranks_once = True

    def worth(self, view: LayerView, budget: int) -> torch.Tensor:
        assert view.attention is not None
        return view.attention
