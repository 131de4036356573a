"""Passing on to a chunk's stored K/V what its probes were off (AgentKVShift; policy ``offset``).

Owns the arithmetic, in float32 and rounded once. Which tokens are probes is the policy's business.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from blendrag.fusor.rows import Rows
from blendrag.selection import PromptGeometry
from blendrag.selection.places import places


class ChunkShift:
    """Made once per request, of the blended chunks of ``geometry``."""

    def __init__(self, geometry: PromptGeometry) -> None:
        self._geometry = geometry
        self._chunks = len(geometry.chunk_spans)
        self._computed: torch.Tensor | None = None

    def look(
        self,
        computed: torch.Tensor,
        probes_of: Callable[[PromptGeometry, torch.Tensor], torch.Tensor],
    ) -> None:
        """Take the probes among the tokens ``computed`` ``[S]`` in this layer, most often those of the
        layer before.
        """
        if computed is self._computed:
            return
        self._computed = computed
        self._probes = probes_of(self._geometry, computed)  # [p]
        self._probed = places(self._geometry, self._probes).chunk  # [p]
        self._counts = torch.bincount(self._probed, minlength=self._chunks).clamp_min(1)

    def apply(
        self,
        buffer: torch.Tensor,
        rows: Rows,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Add to ``buffer`` ``[2, Hkv, N, D]``, per chunk, the mean of fresh - loaded over its probes.

        ``keys``/``values`` ``[Hkv, S, D]`` are fresh, of ``rows``, which hold every probe. All tokens of
        a chunk are moved, computed ones too: those are overwritten next. A chunk without probes stays.
        """
        probes = self._probes
        if not probes.numel():
            return
        at = torch.searchsorted(rows.positions, probes)
        fresh = torch.stack((keys.index_select(1, at), values.index_select(1, at))).float()
        off = fresh - buffer.index_select(2, probes).float()  # [2, Hkv, p, D]
        sums = off.new_zeros((*off.shape[:2], self._chunks, off.shape[-1]))
        shift = sums.index_add_(2, self._probed, off) / self._counts[:, None]  # [2, Hkv, chunks, D]
        for chunk, (start, end) in enumerate(self._geometry.chunk_spans):
            buffer[:, :, start:end] += shift[:, :, chunk, None]  # added up in float32
