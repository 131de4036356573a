"""``query``: the tokens that the question looks at (ProphetKV, QCFuse).

A scout pass runs the fresh tokens over the stored KV first; what recomputing is worth is then the
attention that the tokens behind the last chunk pay to a token, summed over heads and layers. Unlike a
deviation seen in the first layers, that finds tokens whose KV goes wrong only in later ones. Layer 0 is
computed for the chosen tokens alone.

In deep models the attention of the middle third of the layers is summed. On pretrained models of 18 to 30
layers it chose about as well as all layers did, and the scout pass ends there: it costs two thirds of a
forward, and the last third of the stored KV loads during recompute. In the embedded model of 12 layers the
last layers matter most, so in shallow models all layers count.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from blendrag.fusor.selection.base import LayerView, SelectionPolicy

#: Layers from which on a model is deep. Between the embedded model and pretrained ones nothing was measured.
DEEP = 16


class QueryPolicy(SelectionPolicy):
    """Most attention from the question; the same ranking in every layer."""

    name: ClassVar[str] = "query"
    asks = True
    asked_depth = (1 / 3, 2 / 3)
    ranks_once = True

    def asked_layers(self, layers: int) -> range:
        return super().asked_layers(layers) if layers >= DEEP else range(layers)

    def worth(self, view: LayerView, budget: int) -> torch.Tensor:
        assert view.question is not None, "a policy that asks is told"
        return view.question
