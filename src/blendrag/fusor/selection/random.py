"""``random``: random tokens, the control that other policies are measured against.

The order is drawn once per prompt, seeded by its geometry, so that the same prompt is always blended alike.
"""

from __future__ import annotations

import torch
import xxhash

from blendrag.fusor.selection.base import LayerView, SelectionPolicy


class RandomPolicy(SelectionPolicy):
    name = "random"
    ranks_once = True

    def scores(self, view: LayerView, budget: int) -> torch.Tensor:
        return random_scores(view)


def random_scores(view: LayerView) -> torch.Tensor:
    """``[n]`` float32 in [0, 1), always the same for one geometry."""
    geometry = view.geometry
    seed = xxhash.xxh32_intdigest(repr((geometry.prompt_tokens, geometry.chunk_spans)).encode())
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(geometry.prompt_tokens, generator=generator)
    return scores.to(view.tokens.device)[view.tokens]
