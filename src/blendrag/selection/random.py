"""``random``: any tokens at all, the control that a policy's own cleverness is measured against.

Drawn once per prompt, from its geometry, so that the same prompt is always blended alike; each layer
keeps the first of the same order.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import xxhash

from blendrag.selection.base import LayerView, PromptGeometry, SelectionPolicy, top


class RandomPolicy(SelectionPolicy):
    """Uniform over the candidates; layer 0 is computed for the chosen alone."""

    name: ClassVar[str] = "random"

    def select(self, layer: int, view: LayerView, budget: int) -> torch.Tensor:
        if budget >= view.tokens.numel():
            return view.tokens
        return top(_order(view.geometry, view.tokens), view.tokens, budget)


def _order(geometry: PromptGeometry, tokens: torch.Tensor) -> torch.Tensor:
    seed = xxhash.xxh32_intdigest(repr((geometry.prompt_tokens, geometry.chunk_spans)).encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(geometry.prompt_tokens, generator=generator).to(tokens.device)[tokens]
