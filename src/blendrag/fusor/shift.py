"""Passing on to a chunk's stored K/V what its probes were off (AgentKVShift; policy ``offset``).

Owns the arithmetic, in float32 and rounded once. Which tokens are probes is the policy's business.
"""

from __future__ import annotations

import torch

from blendrag.fusor.rows import Rows
from blendrag.selection import PromptGeometry
from blendrag.selection.places import places


class ChunkShift:
    """Made once per request; ``candidates`` ``[C]`` are the tokens of its blended chunks."""

    def __init__(self, geometry: PromptGeometry, candidates: torch.Tensor) -> None:
        self._geometry = geometry
        self._candidates = candidates
        self._chunk = places(geometry, candidates).chunk  # [C]

    def apply(
        self,
        buffer: torch.Tensor,
        rows: Rows,
        keys: torch.Tensor,
        values: torch.Tensor,
        probes: torch.Tensor,
    ) -> None:
        """Add to ``buffer`` ``[2, Hkv, N, D]``, per chunk, the mean of fresh - loaded over ``probes``.

        ``keys``/``values`` ``[Hkv, S, D]`` are fresh, of ``rows``, which hold every probe. All tokens of
        a chunk are moved, computed ones too: those are overwritten next. A chunk without probes stays.
        """
        if not probes.numel():
            return
        at = torch.searchsorted(rows.positions, probes)
        fresh = torch.stack((keys[:, at], values[:, at])).float()  # [2, Hkv, p, D]
        off = fresh - buffer[:, :, probes].float()
        chunk, chunks = places(self._geometry, probes).chunk, len(self._geometry.chunk_spans)
        sums = off.new_zeros((*off.shape[:2], chunks, off.shape[-1])).index_add_(2, chunk, off)
        counts = torch.bincount(chunk, minlength=chunks).clamp_min(1)
        shift = sums / counts[:, None]  # [2, Hkv, chunks, D]
        moved = buffer[:, :, self._candidates].float() + shift[:, :, self._chunk]
        buffer[:, :, self._candidates] = moved.to(buffer.dtype)
