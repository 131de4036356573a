"""Where tokens stand in their chunks, for policies that choose by place.

Pure arithmetic on positions, vectorised over all tokens of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blendrag.fusor.selection.base import PromptGeometry


@dataclass(frozen=True)
class Places:
    """Of each token, all ``[n]``."""

    chunk: torch.Tensor
    """Which chunk it is in."""
    start: torch.Tensor
    """Prompt position of the chunk's first token."""
    index: torch.Tensor
    """Its place in the chunk, from 0."""
    length: torch.Tensor
    """Tokens of the chunk."""


def candidates(geometry: PromptGeometry, device: torch.device) -> torch.Tensor:
    """All positions that may be chosen, ascending."""
    spans = [torch.arange(a, b, device=device) for a, b in geometry.chunk_spans]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.long, device=device)


def places(geometry: PromptGeometry, tokens: torch.Tensor) -> Places:
    """``tokens`` ``[n]`` are positions inside blended chunks."""
    bounds = torch.tensor(geometry.chunk_spans, dtype=torch.long, device=tokens.device)
    starts, ends = bounds.reshape(-1, 2).unbind(1)
    chunk = torch.bucketize(tokens, starts.contiguous(), right=True) - 1
    start = starts[chunk]
    return Places(chunk, start, tokens - start, ends[chunk] - start)
