"""``query+shift``: the tokens of ``query``, random ones, and what both show about the others (AgentKVShift).

Part of the budget are random tokens. Tokens that are not recomputed are moved by the error predicted from the
others; see :mod:`blendrag.fusor.shift`. Each request then has chunks of its own, while ``query`` leaves most
tokens as they are stored, so that requests that decode together keep them in memory once.
"""

from __future__ import annotations

import torch

from blendrag.fusor.selection.base import LayerView, top
from blendrag.fusor.selection.query import QueryPolicy
from blendrag.fusor.selection.random import random_scores

PROBE_SHARE = 0.15


class QueryShiftPolicy(QueryPolicy):
    name = "query+shift"
    moves_others = True

    def scores(self, view: LayerView, budget: int) -> torch.Tensor:
        probes = torch.isin(view.tokens, self.probes(view, budget))
        return super().scores(view, budget).masked_fill(probes, float("inf"))

    def probes(self, view: LayerView, budget: int) -> torch.Tensor:
        return top(random_scores(view), view.tokens, round(PROBE_SHARE * budget))
