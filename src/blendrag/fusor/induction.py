"""Heads that copy: they attend to what followed an earlier occurrence of the last token (induction heads,
Olsson et al. 2022, arXiv 2209.11895).

Such a head finds its place by single keys, and can lose it when these are moved by the errors of others.
"""

from __future__ import annotations

import torch

from blendrag.fusor.rows import Rows
from blendrag.fusor.scout import Observed, Scout, scouting
from blendrag.model import measurements
from blendrag.model.adapter import ModelAdapter

#: Counts up when something else is measured, so that what was found earlier is not used.
_VERSION = 1

#: Random tokens that are repeated, and what comes before them.
REPEATED_TOKENS, BEFORE = 48, 16
#: Mean attention to the token that is to be copied from which a head copies.
COPIES_FROM = 0.7


class _CopyScout(Scout):
    """Keeps, of each layer, how much attention each head pays to the token that is to be copied."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(REPEATED_TOKENS - 1, rows=rows)
        self.shares: list[torch.Tensor] = []
        """``[H]`` of each layer."""

    def add(self, weights: torch.Tensor) -> None:
        rows = torch.arange(self.asking, device=weights.device)
        heads = weights.reshape(-1, self.asking, weights.shape[-1])
        # the first row is the second occurrence of the first token, and what followed that is copied
        self.shares.append(heads[:, rows, BEFORE + 1 + rows].float().mean(-1))


def copying_heads(adapter: ModelAdapter) -> dict[int, torch.Tensor]:
    """By layer, the KV heads ``[n]`` with a query head that copies; measured once per model and machine.

    None are found where layers share KV. The model's attention must be one that a scout observes.
    """
    key = measurements.key_of(
        f"copying heads {_VERSION}", adapter.identity.namespace, adapter.device
    )
    known = measurements.recall(key, dict[int, list[int]])
    if known is None:
        known = _measured(adapter)
        measurements.remember(key, known)
    return {layer: torch.tensor(heads, device=adapter.device) for layer, heads in known.items()}


@torch.inference_mode()
def _measured(adapter: ModelAdapter) -> dict[int, list[int]]:
    """By layer, those heads, from one forward of random tokens."""
    vocabulary = adapter.model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(vocabulary, (BEFORE + REPEATED_TOKENS,), generator=generator)
    ids = torch.cat((drawn, drawn[BEFORE:-1])).to(adapter.device)
    scout = _CopyScout(Rows(torch.arange(len(ids), device=adapter.device), len(ids)))
    with (
        adapter.lock,
        adapter.uncompiled(),
        adapter.own_tables(),
        scouting(adapter.stack, lambda: [Observed(scout)]),
    ):
        adapter.stack.base(input_ids=ids[None], use_cache=False)
    shapes, found = adapter.layout.layers, dict[int, list[int]]()
    if len(scout.shares) == len(shapes):
        for layer, (shape, shares) in enumerate(zip(shapes, scout.shares, strict=True)):
            copies = shares.view(shape.kv_heads, -1).amax(-1) >= COPIES_FROM
            if copies.any():
                found[layer] = copies.nonzero()[:, 0].tolist()
    return found
