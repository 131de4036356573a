"""``blend(k)``: chunk heads always, then what the question looks at and is stale (ours).

The first k tokens of a chunk stood where a sink was when they were encoded (EPIC / LegoLink repairs
them alone). The rest are ranked by what the question pays attention to (ProphetKV, QCFuse; see
:mod:`blendrag.selection.query`) times their *staleness*: the share of their true context that they
have not seen, which is all that lies before their chunk out of all that lies before them. That costs
nothing to know, where a measured deviation would cost layer 0 of every candidate.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from blendrag.errors import InvalidInputError
from blendrag.selection.base import LayerView, SelectionPolicy, top
from blendrag.selection.places import Places, places

#: Heads take at most one part in this many of the budget: where chunks are short, the first tokens of
#: all of them would leave nothing to answer the question with (48% instead of 67% of the embedded
#: model's coreferences at r = 0.05, when they were given half).
HEADS_PART = 10


class BlendPolicy(SelectionPolicy):
    """Heads out of at most a tenth of the budget, then query × staleness."""

    name: ClassVar[str] = "blend"
    asks = True

    def __init__(self, k: int = 2) -> None:
        if k < 0:
            raise InvalidInputError(f"blend({k}): k must be 0 or more tokens")
        self.k = k

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        if budget >= view.tokens.numel():
            return view.tokens
        assert view.question is not None, "a policy that asks is told"
        at = places(view.geometry, view.tokens)
        # Fewer heads as budgets fall: of each chunk the first ones stay, so the sets remain nested.
        heads = min(self.k, budget // (HEADS_PART * len(view.geometry.chunk_spans)))
        worth = view.question * staleness(at)  # [n]
        return top(worth.masked_fill(at.index < heads, float("inf")), view.tokens, budget)

    def __str__(self) -> str:
        return f"{self.name}({self.k})"


def staleness(at: Places) -> torch.Tensor:
    """Share of each token's context that it has not seen ``[n]``, in [0, 1)."""
    return at.start.float() / (at.start + at.index + 1)
