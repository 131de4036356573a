"""Moving a prompt's loaded keys to the positions where their chunks landed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendrag.fusor.loader import LoadedSpan
from blendrag.model.positions import Repositioner


class Rotation:
    """Per-request tables that move every loaded key to its prompt position."""

    def __init__(
        self, spans: Sequence[LoadedSpan], repositioner: Repositioner, device: torch.device
    ) -> None:
        moved = [span for span in spans if span.offset]
        self._repositioner = repositioner
        self._region: slice | None = None
        if not moved:
            return
        start, end = moved[0].start, moved[-1].end
        offsets = torch.zeros(end - start, dtype=torch.long)
        for span in moved:
            offsets[span.start - start : span.end - start] = span.offset
        # Gaps between spans rotate by 0 whatever they hold: fresh rows overwrite them afterwards.
        self._region = slice(start, end)
        self._tables = repositioner.tables(offsets.to(device))

    def apply(self, keys: torch.Tensor, layer: int) -> None:
        """Rotate ``keys`` ``[n, Hkv, N, D]`` in place: of ``layer`` and those after it, rotated alike."""
        if self._region is not None:
            self._repositioner.rotate_(keys[:, :, self._region], layer, self._tables)
