"""``random``: any tokens at all, the control that a policy's own cleverness is measured against.

Drawn once per prompt, from its geometry, so that the same prompt is always blended alike; each layer
keeps the first of the same order.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import xxhash

from blendrag.fusor.selection.base import LayerView, PromptGeometry, SelectionPolicy


class RandomPolicy(SelectionPolicy):
    """Uniform over the candidates; layer 0 is computed for the chosen alone."""

    name: ClassVar[str] = "random"
    ranks_once = True

    def worth(self, view: LayerView, budget: int) -> torch.Tensor:
        return _order(view.geometry, view.tokens)


def _order(geometry: PromptGeometry, tokens: torch.Tensor) -> torch.Tensor:
    seed = xxhash.xxh32_intdigest(repr((geometry.prompt_tokens, geometry.chunk_spans)).encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(geometry.prompt_tokens, generator=generator).to(tokens.device)[tokens]
