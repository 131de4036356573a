"""``full`` and ``reuse``: recompute everything, recompute nothing. Every other policy lies between them."""

from __future__ import annotations

import torch

from blendrag.fusor.selection.base import LayerView, SelectionPolicy


class FullPolicy(SelectionPolicy):
    """Every candidate in every layer, through the same scatter path; equals a stock prefill."""

    name = "full"
    budgeted = False

    def fixed_count(self, candidates: int, chunks: int) -> int:
        return candidates

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        return view.tokens


class ReusePolicy(SelectionPolicy):
    """No candidate: full KV reuse with re-positioning, as Prompt Cache does."""

    name = "reuse"
    budgeted = False

    def fixed_count(self, candidates: int, chunks: int) -> int:
        return 0

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        return view.tokens[:0]
