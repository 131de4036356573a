"""The two ends every other policy lies between: recompute everything, recompute nothing."""

from __future__ import annotations

from typing import ClassVar

import torch

from blendrag.fusor.selection.base import LayerView, SelectionPolicy


class FullPolicy(SelectionPolicy):
    """Every candidate in every layer, through the same scatter path: equals a stock prefill."""

    name: ClassVar[str] = "full"
    budgeted = False

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        return view.tokens


class ReusePolicy(SelectionPolicy):
    """No candidate at all: full KV reuse with re-positioning (Prompt Cache's behaviour)."""

    name: ClassVar[str] = "reuse"
    budgeted = False

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        return view.tokens[:0]
