"""``blend(k)``: chunk heads always, then what most heads of the model look at for the question (ours).

The first k tokens of a chunk stood where a sink was when they were encoded (EPIC / LegoLink repairs
them alone). The rest are ranked by the question's attention (ProphetKV, QCFuse), but damped: see
:attr:`SelectionPolicy.damps`.

Weighing attention by staleness was measured and left out: by the share of its true context that a token
has not seen, and by the deviation seen once it is recomputed. Either chooses worse on the embedded
model; what a token is off by in early layers says little about what later ones need of it.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from blendrag.errors import InvalidInputError
from blendrag.fusor.selection.base import LayerView, SelectionPolicy
from blendrag.fusor.selection.places import places

#: Heads take at most one part in this many of the budget: where chunks are short, the first tokens of
#: all of them would leave little to answer the question with.
HEADS_PART = 10


class BlendPolicy(SelectionPolicy):
    """Heads out of at most a tenth of the budget, then damped attention; one ranking in every layer."""

    name: ClassVar[str] = "blend"
    asks = True
    asked_depth = (0.25, 1.0)
    damps = True
    ranks_once = True

    def __init__(self, k: int = 2) -> None:
        if k < 0:
            raise InvalidInputError(f"blend({k}): k must be 0 or more tokens")
        self.k = k

    def worth(self, view: LayerView, budget: int) -> torch.Tensor:
        assert view.question is not None, "a policy that asks is told"
        heads = min(self.k, budget // (HEADS_PART * len(view.geometry.chunk_spans)))
        at = places(view.geometry, view.tokens)
        return view.question.masked_fill(at.index < heads, float("inf"))

    def __str__(self) -> str:
        return f"{self.name}({self.k})"
