"""``offset``: recompute a few probes, give the rest of their chunk the mean shift (AgentKVShift).

A chunk met in another context moves as a whole to some degree: the K and V of its tokens, keys at
their prompt positions, are off by much the same vector. That vector, per chunk, head and layer, is
the mean of fresh − loaded over the probes; the fusion adds it to what is not recomputed.

``offset`` alone spends its budget on probes. ``offset+query`` and the like spend a few tokens of
every chunk on probes and the rest as the other policy says: what that one recomputes are its
outliers, which speak for nobody else and do not count in the mean.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from blendrag.errors import InvalidInputError
from blendrag.selection.base import LayerView, PromptGeometry, SelectionPolicy, top
from blendrag.selection.places import spread

#: Probes of a chunk, about, beside another policy; out of at most half of the budget.
PROBES = 4


class OffsetPolicy(SelectionPolicy):
    """Evenly spread probes, and another policy's tokens beside them if there is one."""

    name: ClassVar[str] = "offset"
    shifts = True

    def __init__(self, other: SelectionPolicy | None = None) -> None:
        if isinstance(other, OffsetPolicy):
            raise InvalidInputError("policy offset+offset: name another policy behind offset+")
        self.other = other
        if other is not None:
            self.looks, self.asks, self.damps = other.looks, other.asks, other.damps
            self.budgeted, self.schedule = other.budgeted, other.schedule
            self.unseen = f"{self.name}+{other.unseen}"

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        if self.budgeted and budget >= view.tokens.numel():
            return view.tokens
        order = spread(view.geometry, view.tokens)
        if self.other is None:
            return top(-order, view.tokens, budget)
        # The first probes of the order, where half of the budget does not pay for all.
        affordable = order < PROBES
        probes = top(-order[affordable], view.tokens[affordable], budget // 2)
        rest = view.only(~torch.isin(view.tokens, probes))
        others = self.other.select(layer, rest, budget - probes.numel())
        return torch.cat((probes, others)).sort().values

    def probes(self, geometry: PromptGeometry, computed: torch.Tensor) -> torch.Tensor:
        if self.other is None:
            return computed
        return computed[spread(geometry, computed) < PROBES]

    def __str__(self) -> str:
        return self.name if self.other is None else f"{self.name}+{self.other}"
