"""Stored KV of a prompt, layer by layer: read into its buffers and turned to its positions.

Owns the loader and the rotation of one prompt. Does not know which tokens are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendrag.fusor.rotation import Rotation
from blendrag.loader import LayerLoader, LoadedSpan
from blendrag.positions import Repositioner
from blendrag.timeline import REPOSITION, WAIT, Timeline, noted


class Placing:
    """Made once per request; each layer is placed once."""

    def __init__(
        self,
        spans: Sequence[LoadedSpan],
        buffers: Sequence[torch.Tensor],
        repositioner: Repositioner,
        all_enter: bool,
        timeline: Timeline | None = None,
    ) -> None:
        """``buffers`` are ``[2, Hkv, N, D]`` per layer. ``all_enter``: every token of blended chunks is
        computed in layer 0, so that loading it there would be thrown away."""
        self._buffers = buffers
        self._all_enter = all_enter
        self._timeline = timeline
        self._placed = [False] * len(buffers)
        self._rotation = Rotation(spans, repositioner, buffers[0].device)
        exact = [span for span in spans if span.exact]
        wanted = [exact if self._skips(i) else spans for i in range(len(buffers))]
        self.loader = LayerLoader(buffers, wanted, timeline)

    def place(self, layer: int) -> None:
        """Block until stored KV of ``layer`` is in place, and move its keys; raises what reading met."""
        if self._placed[layer]:
            return
        with noted(self._timeline, WAIT, layer):
            self.loader.synchronize(layer)
        with noted(self._timeline, REPOSITION, layer):
            self._rotation.apply(self._buffers[layer][0], layer, self._skips(layer))
        self._placed[layer] = True

    def _skips(self, layer: int) -> bool:
        return layer == 0 and self._all_enter
