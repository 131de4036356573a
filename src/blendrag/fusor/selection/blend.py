"""``blend(k)``: chunk heads first, then the tokens that most heads attend to for the question (ours).

The first k tokens of a chunk were attention sinks when it was encoded; EPIC / LegoLink repairs them alone.
The rest are ranked by square roots of the question's attention (ProphetKV, QCFuse); see
:attr:`SelectionPolicy.sqrt_attention`.
"""

from __future__ import annotations

import torch

from blendrag.fusor.selection.base import LayerView, SelectionPolicy

#: Heads take at most 1/10 of the budget: with short chunks they would leave little for the question.
HEADS_PART = 10


class BlendPolicy(SelectionPolicy):
    name = "blend"
    k = 2
    needs_attention = True
    attention_depth = (0.25, 1.0)
    sqrt_attention = True
    ranks_once = True

    def scores(self, view: LayerView, budget: int) -> torch.Tensor:
        assert view.attention is not None
        heads = min(self.k, budget // (HEADS_PART * len(view.geometry.chunk_spans)))
        return view.attention.masked_fill(view.index_in_chunk < heads, float("inf"))
