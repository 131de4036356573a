"""``query``: the tokens that the question attends to (ProphetKV, QCFuse).

A scout pass runs the fresh tokens over stored KV first. A token's score is the attention that the tokens
after the last chunk pay to it, summed over heads and layers. Unlike a deviation in the first layers, this
finds tokens whose KV goes wrong only in later ones. Layer 0 is computed for the chosen tokens alone.

In deep models only the last half of the layers is summed. All stored KV must then be loaded before anything
is recomputed; ``query(33-67)`` sums the middle third, and the rest loads during recompute.
"""

from __future__ import annotations

import torch

from blendrag.fusor.selection.base import LAST_HALF, LayerView, SelectionPolicy


class QueryPolicy(SelectionPolicy):
    name = "query"
    needs_attention = True
    deep_attention_depth = LAST_HALF
    ranks_once = True

    def scores(self, view: LayerView, budget: int) -> torch.Tensor:
        assert view.attention is not None
        return view.attention
