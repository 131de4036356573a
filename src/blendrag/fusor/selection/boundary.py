"""``boundary(k)``: the first k tokens of every chunk, in every layer (EPIC / LegoLink).

Encoding a chunk alone damages its head most: the first tokens become attention sinks. Costs under 1% at k =
16 and chunks of 512. The ratio is ignored.
"""

from __future__ import annotations

import torch

from blendrag.fusor.selection.base import LayerView, SelectionPolicy


class BoundaryPolicy(SelectionPolicy):
    name = "boundary"
    k = 16
    budgeted = False

    def fixed_count(self, candidates: int, chunks: int) -> int:
        return min(candidates, self.k * chunks)

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        # chosen once, at layer 0, so that no later layer waits for the device
        return view.tokens if layer > 0 else view.tokens[view.index_in_chunk < self.k]
